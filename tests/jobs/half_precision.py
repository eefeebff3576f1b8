"""Fits in 16 bits, with loss scaling and without."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from lightning_parallel import full_state_dict
from tests.data import loader
from tests.jobs.lifecycle import Weights
from tests.models.cases import CASES, ByteGPT
from tests.parity import Recorder, trainer_for


def half_precision(
    strategy: str, num_ranks: int, bad_rank: int | None, case: str = "byte_gpt"
) -> tuple[float, Weights]:
    """Four steps in fp16 with loss scaling, the second with an infinite loss on one rank; the scale afterwards."""
    L.seed_everything(3, verbose=False)

    class Module(CASES[case]):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            return loss * float("inf") if batch_idx == 1 and dist.get_rank() == bad_rank else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = trainer_for(strategy, num_ranks, plugins=[plugin], gradient_clip_val=0.5)
    trainer.fit(Module("sgd"), loader(num_ranks, 4, case))
    return scaler.get_scale(), full_state_dict(trainer)


def scale_after(strategy: str, num_ranks: int, resume: str | None, save: str | None) -> float:
    """The loss scale after an epoch of four steps, that doubles after each four; resumed, after two epochs."""
    L.seed_everything(3, verbose=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    trainer = trainer_for(strategy, num_ranks, plugins=[plugin], max_epochs=1 if resume is None else 2)
    trainer.fit(ByteGPT("sgd"), loader(num_ranks), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return float(scaler.get_scale())


class FreeGAN(CASES["gan"]):  # type: ignore[misc]
    """Lightning clips no gradients by hand under loss scaling."""

    def clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """None."""


def scaled_gan(strategy: str, num_ranks: int) -> Weights:
    """Four steps in fp16 with loss scaling."""
    L.seed_everything(3, verbose=False)
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**4))
    trainer = trainer_for(strategy, num_ranks, plugins=[plugin])
    trainer.fit(FreeGAN("sgd"), loader(num_ranks, 4, "gan"))
    return full_state_dict(trainer)


def in_bf16(strategy: str, num_ranks: int, precision: str, case: str) -> list[float]:
    """The losses of four steps."""
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    trainer = trainer_for(strategy, num_ranks, precision=precision, callbacks=[recorder])
    trainer.fit(CASES[case]("sgd"), loader(num_ranks, 4, case))
    return recorder.outcome.losses


def ended_and_begun(strategy: str, num_ranks: int, path: str) -> tuple[Weights, Weights]:
    """Weights in fp64 with which a fit ends, and those with which the fit that resumes from its checkpoint begins."""
    L.seed_everything(3, verbose=False)
    options: dict[str, Any] = {"precision": "64-true", "max_steps": 1}
    trainer = trainer_for(strategy, num_ranks, **options)
    trainer.fit(ByteGPT("adamw"), loader(num_ranks))
    trainer.save_checkpoint(path)
    ended, recorder = full_state_dict(trainer), Recorder()
    again = trainer_for(strategy, num_ranks, **{**options, "max_steps": 2, "max_epochs": 2}, callbacks=[recorder])
    again.fit(ByteGPT("adamw"), loader(num_ranks), ckpt_path=path)
    return ended, recorder.outcome.initial
