"""Loaders with batch samplers: which samples ranks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from tests.parity import trainer_for


class Buckets(Sampler[list[int]]):
    """Batches of several sizes, in an order that each epoch draws."""

    def __init__(self, num_samples: int, *, seed: int | None = None, draws: bool = True) -> None:
        self.batches = [b.tolist() for b in torch.arange(num_samples).split([3, 1, 2] * (num_samples // 6)) if len(b)]
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.draws = draws

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self), generator=self.generator).tolist() if self.draws else range(len(self))
        yield from (self.batches[index] for index in order)


class Reads(L.LightningModule):
    """Notes what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.seen: dict[str, list[list[float]]] = {"train": [], "validation": [], "test": []}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch[0][:, 0].tolist())
        return (batch[0] @ self.weight - 1).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["validation"].append(batch[0][:, 0].tolist())

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen["test"].append(batch[0][:, 0].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def batches_of(kind: str, data: TensorDataset, num_ranks: int, rank: int) -> Any:
    """A batch sampler of that kind over `data`."""
    size = 4
    samplers: dict[str, Any] = {
        "plain": lambda: BatchSampler(SequentialSampler(data), size, drop_last=False),
        "dropped": lambda: BatchSampler(SequentialSampler(data), size, drop_last=True),
        "buckets": lambda: Buckets(len(data), draws=False),
        "drawn": lambda: Buckets(len(data)),
        "unlike": lambda: Buckets(len(data), seed=rank),
        "distributed": lambda: BatchSampler(DistributedSampler(data, num_ranks, rank, shuffle=False), size, False),
    }
    return samplers[kind]()


def read(strategy: str, num_ranks: int, kind: str, num_samples: int, rank: int | None = None) -> Any:
    """Two epochs, a validation and a test with a batch sampler; what this rank reads, and its weights."""
    L.seed_everything(3, verbose=False)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    data = TensorDataset(torch.arange(4.0 * num_samples).reshape(num_samples, 4))
    make = lambda: DataLoader(data, batch_sampler=batches_of(kind, data, num_ranks, rank))  # noqa: E731
    module = Reads()
    trainer = trainer_for(strategy, num_ranks, max_epochs=2)
    torch.rand(1 + rank)  # ranks have drawn other numbers by now
    trainer.fit(module, make(), make())
    trainer.test(module, make(), verbose=False)
    return module.seen, module.weight.detach()
