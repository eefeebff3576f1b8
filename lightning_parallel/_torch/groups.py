"""Process groups and device meshes: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def flattened(mesh: DeviceMesh, name: str, *, backend: str | None = None) -> DeviceMesh:
    """A mesh of one axis `name` in place of all axes of `mesh`; with `backend`, always in a group of its own.

    `DeviceMesh._flatten`, since 2.4; waits for a public spelling.
    """
    return mesh._flatten(name, backend)


def concatenated(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh of the axes of several meshes of the same ranks, of which some may be flattened.

    `DeviceMesh._concatenate`, since 2.10; waits for a public spelling.
    """
    return DeviceMesh._concatenate(list(meshes))


@contextlib.contextmanager
def gloo_of_one_thread() -> Iterator[None]:
    """In here, groups that are made for gloo have one thread each, where torch gives them two.

    Either thread writes the name of the collective that it has finished into one string of the group, under no lock.
    Names of more than 15 characters, such as that of the gathers of DTensors, are on the heap, and two writes at once
    break it: the process ends some time later, anywhere. So in 2.11, 2.13 and 2.14; `tests/stress_gloo.py` shows it.
    Not for the group of the process, in which DDP runs: the names of its collectives are short, and its PowerSGD waits
    for one collective in the thread that has ended another, which one thread alone would do for ever.
    `ProcessGroupGloo._Options`, in all versions of the window; waits for a lock there, or for `pg_options` of gloo.
    """
    if not dist.is_gloo_available():
        yield
        return
    of_torch: Any = dist.distributed_c10d.ProcessGroupGloo

    class OfOneThread(of_torch):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **settings: Any) -> None:
            options = of_torch._Options()
            options._timeout, options._threads = timeout, 1
            for name, value in settings.items():  # `enable_reconfigure`, since 2.14
                setattr(options, name, value)
            interfaces = os.environ.get("GLOO_SOCKET_IFNAME")
            options._devices = (
                [of_torch.create_device(interface=each) for each in interfaces.split(",")]
                if interfaces
                else [of_torch.create_default_device()]
            )
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = OfOneThread  # type: ignore[misc]
    try:
        yield
    finally:
        dist.distributed_c10d.ProcessGroupGloo = of_torch  # type: ignore[misc]


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let collectives of `group` wait so long for a missing rank: groups of a mesh cannot be made with a timeout.

    `torch.distributed.set_timeout` (public) since 2.15, where `distributed_c10d._set_pg_timeout`, since 2.2, warns;
    waits for a `timeout` of `init_device_mesh`.
    """
    set_of_torch = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_of_torch(timeout, group)


def broadcast_tensors(tensors: Sequence[Tensor], *, source: int, group: Any = None, bucket_bytes: int = 2**26) -> None:
    """Broadcast many tensors from rank `source` of `group`, by default of all ranks, a bucket a collective.

    `torch.distributed._broadcast_coalesced`, since 1.0; what DDP itself uses, no public spelling.
    """
    if tensors:
        group = group or dist.distributed_c10d._get_default_group()
        dist._broadcast_coalesced(group, list(tensors), bucket_bytes, source)  # type: ignore[attr-defined]


def reduce_scatter(part: Tensor, whole: Tensor, group: Any) -> None:
    """Add up `whole` over the ranks, and put this rank's equal part along the first dimension into `part`.

    `torch.distributed.reduce_scatter_single`, since 2.13, where `reduce_scatter_tensor` warns.
    """
    collective = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    collective(part, whole, group=group)
