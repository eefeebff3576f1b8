"""Faults in strategies, by name, that a verification has to find."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch.strategies import Strategy

from lightning_parallel import _lightning
from lightning_parallel.strategies import streams, while_set_up, whole_checkpoints
from lightning_parallel.techniques import clipping
from lightning_parallel.techniques.context import attention
from lightning_parallel.techniques.context.sequences import Sequences
from lightning_parallel.verification.records import Record
from tests.jobs.verification import recorded


def _wrong_loss_scale() -> Any:
    backward = Strategy.backward

    def twice(self: Any, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
        return backward(self, closure_loss * 2, *args, **kwargs)

    return mock.patch.object(Strategy, "backward", twice)


def _same_stream() -> Any:
    stream = streams.data_rank_stream
    return mock.patch.object(streams, "data_rank_stream", lambda _, **kwargs: stream(0, **kwargs))


def _shifted() -> Any:
    """Parts of a sequence are put together one position late."""
    join = Sequences.join

    def late(self: Any, part: Any, *args: Any, **kwargs: Any) -> Any:
        return join(self, part, *args, **kwargs).roll(1, dims=1)

    return mock.patch.object(Sequences, "join", late)


def _counted_from_zero() -> Any:
    """Each part of a sequence begins at position 0."""
    return mock.patch.object(attention, "positions_of_part", _positions)


def _positions(sequences: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    return torch.arange(*args, **kwargs)


def _own_norm() -> Any:
    """Each rank clips by the norm of its shards."""
    return mock.patch.object(clipping, "_power", lambda group, axes, norm_type: sum(g.norm() ** 2 for g in group))


def _all_samples() -> Any:
    return mock.patch.object(_lightning, "with_sampler", lambda loader, sampler: loader)


def _without_resumed_optimizers() -> Any:
    return mock.patch.object(whole_checkpoints, "load_whole_optimizer_state", return_value=None)


FAULTS: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "forgotten all-reduce": lambda: mock.patch("lightning_parallel.steps.reduce_gradients", return_value=None),
    "wrong loss scale": _wrong_loss_scale,
    "duplicated sampler": _all_samples,
    "metric counted twice": lambda: mock.patch.object(
        while_set_up, "metrics_synced_over", return_value=contextlib.nullcontext()
    ),
    "shifted across a cut": _shifted,
    "wrong rotary position": _counted_from_zero,
    "shared dropout seed": _same_stream,
    "clipped by one rank's norm": _own_norm,
    "optimizer not resumed": _without_resumed_optimizers,
}


@contextlib.contextmanager
def _said() -> Iterator[list[str]]:
    """The error with which a run ends, in words."""
    words: list[str] = []
    try:
        yield words
    except Exception as error:
        words.append(f"{type(error).__name__}: {error}")


def recorded_with(fault: str, make: Any, strategy: str, size: int, readers: int, folder: Path) -> Record | str:
    """A rank's record, or the error with which its run ends."""
    with FAULTS[fault](), _said() as words, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ranks 0 and 1 have read the same samples")  # which is what is looked for
        record = recorded(make, "byte_gpt", strategy, size, readers, folder)
    return words[0] if words else record
