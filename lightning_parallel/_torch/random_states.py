"""Random numbers of DTensors: private names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random


@contextlib.contextmanager
def states_of_ranks(mesh: DeviceMesh) -> Iterator[None]:
    """Inside this context, random operations on DTensors draw from the generator that each rank has.

    The first one of a process, such as dropout in a layer that is split, would otherwise broadcast the state of rank 0
    to all ranks, because torch makes its tracker of states only then. All would draw the same numbers from there on,
    and stages of a pipeline, which come to it at different times or not at all, would wait for each other.
    `torch.distributed.tensor._random`, whose tracker can be made without the broadcast in all supported versions; the
    public `manual_seed` does so, too, but sets the seed. On the host there is no tracker.

    Args:
        mesh: All ranks.
    """
    has_states = hasattr(getattr(torch, mesh.device_type, None), "set_rng_state")
    if _random._rng_tracker is not None or mesh.device_type == "cpu" or not has_states:
        yield
        return
    _random._rng_tracker = _random.OffsetBasedRNGTracker(mesh, run_state_sync=False)
    try:
        yield
    finally:
        _random._rng_tracker = None
