"""Ranks with different numbers of batches: what they train, log and count."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import SumMetric

from lightning_parallel import full_state_dict
from tests.data import data_of
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

SIZE = 4


class Stream(IterableDataset[Tensor]):
    """Batches without a length."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.batches)


class Module(DeepTied):
    """Counts samples, and keeps what it has seen in lists."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.count, self.sum = SumMetric(), SumMetric()
        self.seen: list[float] = []
        self.ends: list[int] = []
        self.evaluated = 0.0
        self.steps: list[tuple[int, bool]] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        tokens = batch[0]
        self(tokens)
        value = tokens.float().mean()
        self.seen.append(value.item())
        self.log("value", value, sync_dist=True, batch_size=len(tokens))
        self.count.update(len(tokens))
        self.sum.update(tokens.float().sum())

    def on_validation_batch_end(self, *args: Any) -> None:
        self.ends.append(len(self.seen))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append((self.global_step, self.trainer.is_last_batch))


def batches_of(reader: int, sizes: Sequence[int]) -> list[list[Tensor]]:
    rows = data_of("byte_gpt", 128, 1).tensors[0]  # type: ignore[attr-defined]
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [[rows[32 * reader + start : 32 * reader + end]] for start, end in itertools.pairwise(starts)]


def loader_of(strategy: str, num_ranks: int, sizes: Sequence[Sequence[int]], kind: str) -> DataLoader[Any]:
    """Batches of these sizes for each rank that reads.

    Args:
        strategy: The name of the strategy.
        num_ranks: The number of ranks.
        sizes: Of each rank's batches.
        kind: ``"stream"``, or ``"sized"`` for a data set with a length.
    """
    name, _, options = strategy.partition(":")
    readers = num_readers(name, num_ranks) // (2 if "=2" in options.replace("shard=2", "") else 1)
    rank = dist.get_rank() if num_ranks > 1 else 0
    # Stages of a pipeline are far apart, ranks that share a layer or a sequence are neighbours.
    reader = rank % readers if "pipeline" in options else rank * readers // num_ranks
    batches = batches_of(reader, sizes[reader])
    if kind == "stream":
        return DataLoader(Stream(batches), batch_size=None)  # type: ignore[arg-type]
    rows = [row for each in batches for row in each[0]]
    return DataLoader(TensorDataset(torch.stack(rows)) if rows else [], batch_size=SIZE)  # type: ignore[arg-type]


def trained(
    strategy: str, num_ranks: int, sizes: Sequence[Sequence[int]], kind: str, **kwargs: Any
) -> tuple[dict[str, Tensor], list[tuple[int, bool]], list[str]]:
    """Weights, what is known after each step, and what rank 0 was told."""
    L.seed_everything(3, verbose=False)
    module = Module()
    kwargs = {"max_epochs": 2, "use_distributed_sampler": False, "limit_val_batches": 0, **kwargs}
    trainer = trainer_for(strategy, num_ranks, **kwargs)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module, loader_of(strategy, num_ranks, sizes, kind))
    words = [str(each.message) for each in told if "on all ranks" in str(each.message)]
    return full_state_dict(trainer), module.steps, words


def validated(
    strategy: str, num_ranks: int, sizes: Sequence[Sequence[int]], kind: str, *, fits: bool = False
) -> tuple[dict[str, float], int, int]:
    """Logged and counted values, and how often the module's lists and hooks have seen a batch."""
    L.seed_everything(3, verbose=False)
    module = Module()
    trainer = trainer_for(strategy, num_ranks, use_distributed_sampler=False)
    loaders = [loader_of(strategy, num_ranks, sizes, kind) for _ in range(2)]
    if fits:
        trainer.fit(module, loader_of(strategy, num_ranks, [[4, 4]] * num_ranks, "sized"), loaders)
    else:
        trainer.validate(module, loaders, verbose=False)
    found = {
        "value": float(trainer.callback_metrics["value/dataloader_idx_1"]),
        "count": float(module.count.compute()),
        "sum": float(module.sum.compute()),
    }
    return found, len(module.seen), len(module.ends)


class Gathering(Module):
    """Meets the other ranks in each step of an evaluation."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)
        self.all_gather(batch[0].float().mean())


def gathered(strategy: str, num_ranks: int, sizes: Sequence[Sequence[int]], kind: str) -> None:
    """Validate with a meeting in each step."""
    trainer = trainer_for(strategy, num_ranks, use_distributed_sampler=False)
    trainer.validate(Gathering(), loader_of(strategy, num_ranks, sizes, kind), verbose=False)


def different_sharers(strategy: str, *, fits: bool) -> None:
    """Two ranks that compute the same samples together read different ones, as a stream for each rank gives them."""
    loader: Any = DataLoader(Stream(batches_of(dist.get_rank(), [4, 4])), batch_size=None)  # type: ignore[arg-type]
    trainer = trainer_for(strategy, 2, use_distributed_sampler=False, limit_val_batches=0 if fits else 1.0)
    if fits:
        trainer.fit(Module(), loader)
    else:
        trainer.validate(Module(), loader, verbose=False)


def one_sharer_shorter(strategy: str) -> None:
    """Two ranks that compute the same samples are given different numbers of batches."""
    batches = batches_of(0, [4] * (5 - 2 * dist.get_rank()))
    trainer = trainer_for(strategy, 2, use_distributed_sampler=False, limit_val_batches=0)
    trainer.fit(Module(), DataLoader(Stream(batches), batch_size=None))  # type: ignore[arg-type]
