"""Callbacks that write predictions, on one of the ranks that share samples: each sample is written once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.pytorch.callbacks import BasePredictionWriter

from lightning_parallel import _torch

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_WRITES = ("write_on_batch_end", "write_on_epoch_end")


@contextmanager
def written_once(trainer: Trainer, group: dist.ProcessGroup, *, is_writing: bool) -> Iterator[None]:
    """Inside this context, prediction writers of `trainer` write on the ranks of one group alone.

    Collectives in a writer, such as a gather of all predictions to rank 0, run over that group: the other ranks do not
    call it, and have nothing to add.

    Args:
        trainer: The trainer, with its callbacks.
        group: Ranks that read different samples, among them this one.
        is_writing: Whether this group is the one whose ranks write.
    """
    writers = [callback for callback in _callbacks(trainer) if isinstance(callback, BasePredictionWriter)]
    own = [(writer, name, vars(writer).get(name)) for writer in writers for name in _WRITES]
    for writer, name, _ in own:
        write = getattr(writer, name)
        setattr(writer, name, functools.partial(_write, write, group) if is_writing else _leave_out)
    try:
        yield
    finally:
        for writer, name, before in own:
            delattr(writer, name)
            if before is not None:
                setattr(writer, name, before)


def _callbacks(trainer: Trainer) -> list[Any]:
    return trainer.callbacks  # type: ignore[attr-defined,no-any-return]


def _write(write: Callable[..., None], group: dist.ProcessGroup, /, *args: Any, **kwargs: Any) -> None:
    with _torch.groups.all_ranks_are(group):
        write(*args, **kwargs)


def _leave_out(*_: Any, **__: Any) -> None:
    """Write nothing: another rank has the same predictions."""
