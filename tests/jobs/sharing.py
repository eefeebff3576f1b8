"""What is run where some ranks read the same samples."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_parallel import build_strategy
from lightning_parallel.callbacks import ExponentialMovingAverage, GlobalBatch, GradientNorm
from tests.data import GLOBAL_BATCH, batches
from tests.models.cases import ByteGPT
from tests.parity import make_trainer


def lifecycle(strategy: str, num_ranks: int, num_readers: int) -> dict[str, Any]:
    """Validate, fit with validation, test and predict with the same objects, and callbacks that count samples."""
    L.seed_everything(3, verbose=False)
    module = ByteGPT("adamw")
    norms: list[float] = []

    class Norms(L.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            norms.append(float(trainer.callback_metrics["grad_norm"]))

    built = strategy if strategy == "auto" else build_strategy(strategy)
    callbacks = [GlobalBatch(GLOBAL_BATCH), GradientNorm(), ExponentialMovingAverage(0.5), Norms()]
    trainer = make_trainer(built, num_ranks, num_sanity_val_steps=1, callbacks=callbacks)
    loader = batches("byte_gpt", num_readers)
    found: dict[str, Any] = {"before": trainer.validate(module, loader, verbose=False)}
    trainer.fit(module, loader, loader)
    found["during"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["test"] = trainer.test(module, loader, verbose=False)
    found["predictions"] = torch.stack(trainer.predict(module, loader))
    found["norms"] = norms
    found["plain"] = type(module.model.blocks[0]).__module__ == "tests.models.cases"
    return found


class CountsSamples(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[0])), sync_dist=True, reduce_fx="sum", on_epoch=True, on_step=False)
        return super().training_step(batch, batch_idx)


def counted(strategy: str, num_ranks: int, num_readers: int) -> float:
    trainer = make_trainer(build_strategy(strategy), num_ranks)
    trainer.fit(CountsSamples(), batches("byte_gpt", num_readers))
    return float(trainer.callback_metrics["samples"])
