"""Records of a run: what each rank read, computed and ended with."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.techniques.pipeline.microbatches import tensors_of


@dataclass
class Microstep:
    """One call of the training step.

    Args:
        batch: A copy of its batch in host memory.
        fingerprint: A number made from the batch.
        random: The state from which the step draws; ``None`` where nobody has noted it.
        draws: Whether the step drew random numbers.
        loss: The loss; ``None`` for a step without one.
        logged: Values logged until its end.
    """

    batch: Any
    fingerprint: int
    random: RandomState | None = None
    draws: bool = False
    loss: float | None = None
    logged: dict[str, float] = field(default_factory=dict)


@dataclass
class Evaluation:
    """One run of an entry point.

    Args:
        values: What it logged, by name.
        batches: For each loader, the batches that this rank was given.
        predictions: What each of them gave, as tensors one behind another; of `predict` only.
    """

    values: dict[str, float] = field(default_factory=dict)
    batches: list[list[Any]] = field(default_factory=list)
    predictions: list[list[list[Tensor]]] = field(default_factory=list)


@dataclass
class Record:
    """One rank's part of a run.

    Args:
        rank: This rank.
        reader: Its place among the ranks that read different samples.
        num_readers: The number of these.
        is_manual: Whether the module optimizes by itself.
        shares_samples: Whether several ranks compute the same samples together.
        epochs: The calls of the training step, by epoch.
        indices: Numbers of the samples that this rank's sampler deals out in an epoch; ``None`` for other loaders.
        num_samples: The samples of the dataset behind `indices`.
        num_dropped: The samples that this rank's loader may leave out at the end of an epoch (``drop_last``).
        buffers: Names of entries of the model that are no parameters.
        weights: The whole model before the first update and after each, on rank 0.
        logged: Values logged in training, at its end.
        of_validation: Names of values that validation has logged during training.
        validations: The runs of validation during training.
        evaluations: Entry point -> what it gave after training.
        resumed: The whole model at the end of a run that resumed in the middle, on rank 0.
        again: Values logged until the end of each step of that run.
        saved_after: The number of steps and of updates after which a checkpoint was saved; ``None`` without one.
        takes: Of one process: how it takes the batches of all readers, in turn (``"turns"``), as one batch
            (``"joined"``), or only those of the first one (``"first"``).
        strategy: The strategy as it was given.
        first_step: What the comparison of the first step said.
    """

    rank: int = 0
    reader: int = 0
    num_readers: int = 1
    is_manual: bool = False
    shares_samples: bool = False
    epochs: list[list[Microstep]] = field(default_factory=list)
    indices: list[int] | None = None
    num_samples: int = 0
    num_dropped: int = 0
    buffers: set[str] = field(default_factory=set)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    logged: dict[str, float] = field(default_factory=dict)
    of_validation: set[str] = field(default_factory=set)
    validations: list[Evaluation] = field(default_factory=list)
    evaluations: dict[str, Evaluation] = field(default_factory=dict)
    resumed: dict[str, Tensor] = field(default_factory=dict)
    again: list[dict[str, float]] = field(default_factory=list)
    saved_after: tuple[int, int] | None = None
    takes: Literal["turns", "joined", "first"] = "turns"
    strategy: str = ""
    first_step: str = ""

    @property
    def microsteps(self) -> list[Microstep]:
        """Those of all epochs."""
        return [step for epoch in self.epochs for step in epoch]

    def save(self, folder: Path) -> None:
        """Write it into `folder`."""
        torch.save(self, folder / f"rank_{self.rank}.pt")


def load_records(folder: Path) -> list[Record]:
    """Read the records of all ranks, which this package has written, in the order of ranks."""
    found = [torch.load(path, weights_only=False) for path in folder.glob("rank_*.pt")]
    return sorted(found, key=lambda record: record.rank)


def readers_of(records: list[Record]) -> list[Record]:
    """The first rank of each reader, in the order of readers."""
    first = {record.reader: record for record in sorted(records, key=lambda record: -record.rank)}
    return [first[reader] for reader in sorted(first)]


def joined(batches: Sequence[Any]) -> Any:
    """One batch of the samples of several, along the first dimension of their tensors; ``None`` if they are no parts.

    Args:
        batches: Collections of the same structure; what is no tensor has to be the same in each.
    """
    flat, specs = zip(*(tree_flatten(batch) for batch in batches), strict=True)
    if any(spec != specs[0] for spec in specs):
        return None
    leaves: list[Any] = []
    for parts in zip(*flat, strict=True):
        first = parts[0]
        if isinstance(first, Tensor) and first.ndim and all(part.shape == first.shape for part in parts):
            leaves.append(torch.cat(parts))
        elif isinstance(first, int | float | str | bool | None) and all(part == first for part in parts):
            leaves.append(first)
        else:
            return None
    return tree_unflatten(leaves, specs[0])


def tensors_in(value: Any) -> list[Tensor]:
    """Copies in host memory of the tensors in a collection, in order; numbers as tensors."""
    return [torch.as_tensor(each).detach().cpu().clone() for each in tensors_of(value, (Tensor, int, float))]


def fingerprint_of(batch: Any) -> int:
    """A number made from the tensors and numbers of `batch`."""
    number = 0
    for tensor in tensors_in(batch):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data if tensor.numel() else b""
        number = zlib.crc32(data, zlib.crc32(str(tuple(tensor.shape)).encode(), number))
    return number
