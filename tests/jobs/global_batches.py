"""Loaders and fits for the callbacks about batches."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError
from tests.data import data_of
from tests.models.cases import ByteGPT
from tests.names import num_ranks
from tests.parity import trainer_for

MICROBATCH = 2

SIZE = 16

WINDOWS = 3


def microbatches(
    batch_size: int = MICROBATCH, case: str = "byte_gpt", num_samples: int = SIZE * WINDOWS, *, shuffle: bool = False
) -> Any:
    return DataLoader(data_of(case, num_samples, SIZE), batch_size=batch_size, shuffle=shuffle)


def run(ranks: Any, name: str, job: Any, *args: Any) -> Any:
    """Rank 0's answer of ``job(name, number of ranks, ...)``."""
    if name in ("auto", "dp_custom"):
        return job(name, 1, *args)
    return ranks(num_ranks(name)).run(job, name, num_ranks(name), *args)[0]


def accumulation(module: Any, data: Any, *callbacks: Callback, **kwargs: Any) -> int:
    """What it was while training."""
    seen = []

    class Look(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            seen.append(trainer.accumulate_grad_batches)

    trainer = trainer_for("auto", 1, callbacks=[*callbacks, Look()], **kwargs)
    try:
        trainer.fit(module, data)
    finally:
        assert trainer.accumulate_grad_batches == kwargs.get("accumulate_grad_batches", 1)
    assert len(set(seen)) == 1
    return seen[0]


def refusal(module: Any, data: Any, *callbacks: Callback, **kwargs: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        accumulation(module, data, *callbacks, **kwargs)
    return str(caught.value)


class Listed(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


class Failing(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            raise ArithmeticError
        return super().training_step(batch, batch_idx)


class OwnLoader(ByteGPT):
    def train_dataloader(self) -> Any:
        return microbatches()
