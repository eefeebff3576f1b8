"""The batches that a step has read, their samples in the data set, and a file of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass(frozen=True)
class ReadBatch:
    """A batch that this rank has read.

    Args:
        epoch: The epoch.
        batch_idx: Its index there, as Lightning counts.
        position: Its place among those that the loader has given to this run in this epoch. ``None`` where nobody
            knows.
        loader: The loader, or what the trainer has in its place.
    """

    epoch: int
    batch_idx: int
    position: int | None = None
    loader: Any = field(default=None, repr=False, compare=False)

    def samples(self) -> list[int] | None:
        """The indices of its samples in the data set, ``None`` where the order of the loader cannot be drawn again."""
        if self.position is None or type(self.loader) is not DataLoader or not self.loader.in_order:
            return None
        # The strategy notes what is read, and begins in the middle of an epoch after a resume there.
        noting = self.loader.batch_sampler
        batches, skipped = getattr(noting, "batches", noting), getattr(noting, "skipped", {}).get(self.epoch, 0)
        if skipped is None:
            return None
        # A subclass may give anything, and a random order cannot be told from a sampler that has given it.
        if type(batches) is not BatchSampler or type(batches.sampler) not in (SequentialSampler, DistributedSampler):
            return None
        sampler = copy.copy(batches.sampler)  # the epoch is set on the copy only
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(self.epoch)
        again = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        return [int(index) for index in next(islice(again, skipped + self.position, None), [])]


@dataclass(frozen=True)
class StepRead:
    """An optimizer step and what this rank has read for it.

    Args:
        global_step: The number of steps before it.
        batches: Those of its accumulation window.
        is_finite: Whether the losses of this rank were finite; ``None`` where nobody knows.
    """

    global_step: int
    batches: tuple[ReadBatch, ...]
    is_finite: bool | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what is the same on all ranks, in plain values."""
        return {
            "global_step": self.global_step,
            "batches": [{"epoch": batch.epoch, "batch_idx": batch.batch_idx} for batch in self.batches],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StepRead:
        """A step of an earlier run, from its `state_dict`."""
        return cls(state["global_step"], tuple(ReadBatch(**batch) for batch in state["batches"]))


def gather_steps(steps: Sequence[StepRead]) -> list[dict[str, Any]]:
    """Take together what every rank has read for `steps`, which are the same on all ranks. A collective.

    Returns:
        For each step its number and, in order of rank, whether the losses were finite and the batches with the indices
        of their samples.
    """
    own = [
        {
            "loss_is_finite": step.is_finite,
            "batches": [
                {"epoch": batch.epoch, "batch_idx": batch.batch_idx, "samples": batch.samples()}
                for batch in step.batches
            ],
        }
        for step in steps
    ]
    of_ranks: list[Any] = [own]
    if dist.is_initialized() and dist.get_world_size() > 1:
        of_ranks = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
    return [
        {
            "global_step": step.global_step,
            "ranks": [{"rank": rank, **found[number]} for rank, found in enumerate(of_ranks)],
        }
        for number, step in enumerate(steps)
    ]


def write_steps(trainer: Trainer, name: str, content: Mapping[str, Any]) -> tuple[str, str]:
    """Write `content` to a file of the logger's folder, or of ``default_root_dir``, on rank 0. A collective.

    Args:
        trainer: The trainer.
        name: The name of the file.
        content: Plain values.

    Returns:
        The path, and the error in words if it could not be written; that of rank 0 is the one to be told.
    """
    folder = trainer.log_dir or trainer.default_root_dir
    path, error = f"{folder}/{name}", ""
    if trainer.is_global_zero:
        try:
            files = get_filesystem(folder)
            files.makedirs(folder, exist_ok=True)
            with files.open(path, "w") as file:
                json.dump(content, file, indent=1)
        except OSError as failure:  # it must not take the place of what it is about
            error = f"{type(failure).__name__}: {failure}"
    trainer.strategy.barrier("written")  # others that end earlier would take rank 0 with them
    return path, error
