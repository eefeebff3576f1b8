"""Modules that deal out samples to ranks by themselves, and streams that nobody has dealt out."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset

from lightning_parallel import full_state_dict
from tests.data import GLOBAL_BATCH, data_of
from tests.jobs.first_steps import said
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

DATA: Any = data_of("byte_gpt", 4 * GLOBAL_BATCH, GLOBAL_BATCH)


class Everything(IterableDataset[Any]):
    """The same samples for each rank."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Striding(DistributedSampler[Any]):
    """A sampler of a class of its own."""


class DealsOut(DeepTied):
    """A module whose loader has a sampler for ranks, as scripts for DDP do.

    Args:
        kind: What deals out: ``"sampler"``, ``"batches"``, ``"single"`` for samples without batches, ``"class"``,
            ``"nodes"`` for one that takes each two ranks as one, ``"stream"`` for nothing; ``"told"`` for a sampler
            that shuffles, which the module tells the epoch.
        size: The samples in a batch.
    """

    def __init__(self, kind: str, size: int) -> None:
        super().__init__("sgd")
        self.kind, self.size = kind, size
        self.read: list[list[int]] = []

    def train_dataloader(self) -> DataLoader[Any]:
        world, rank, data, size = self.trainer.world_size, self.trainer.global_rank, DATA, self.size
        if self.kind == "stream":
            return DataLoader(Everything(), size)
        if self.kind == "nodes":
            return DataLoader(data, size, sampler=DistributedSampler(data, world // 2, rank // 2, shuffle=False))
        cls: Any = Striding if self.kind == "class" else DistributedSampler
        sampler = cls(data, world, rank, shuffle=self.kind == "told", seed=5)
        self.sampler = sampler
        if self.kind == "batches":
            return DataLoader(data, batch_sampler=BatchSampler(sampler, size, drop_last=True))
        if self.kind == "single":
            return DataLoader(data, None, sampler=sampler)
        return DataLoader(data, size, sampler=sampler)

    def on_train_epoch_start(self) -> None:
        if self.kind == "told":
            self.sampler.set_epoch(100 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens = batch[0] if batch[0].ndim == 2 else batch[0][None]
        return super().training_step([tokens], batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        rows = batch[0] if batch[0].ndim == 2 else batch[0][None]
        self.read.append([int((DATA.tensors[0] == row).all(1).nonzero()[0]) for row in rows])


def trained(strategy: str, num_ranks: int, kind: str, **kwargs: Any) -> tuple[dict[str, Tensor], Any, list[str]]:
    """Weights, the samples of each step, and what is said and warned of.

    Args:
        strategy: Its name and options.
        num_ranks: The number of ranks.
        kind: As in `DealsOut`.
        kwargs: Further settings of the trainer.
    """
    L.seed_everything(3, verbose=False)
    readers = 1
    if num_ranks > 1:
        readers = 2 if "=2" in strategy else num_readers(strategy.partition(":")[0], num_ranks)
    module = DealsOut(kind, GLOBAL_BATCH // readers)
    trainer = trainer_for(strategy, num_ranks, max_epochs=2, limit_val_batches=0, **kwargs)
    with said("a DistributedSampler") as lines, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(module)
    warned = [str(each.message) for each in told if "first batch of training" in str(each.message)]
    return full_state_dict(trainer), module.read, [*lines, *warned]
