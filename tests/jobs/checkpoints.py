"""Runs that are saved and resumed, with all that a checkpoint has at their ends."""

from __future__ import annotations

import random
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from tests.data import loader
from tests.models.cases import CASES
from tests.parity import trainer_for

CASE = "parameter_groups"
EPOCH = 3
"""Batches of an epoch."""


class Losses(Callback):
    """Notes the loss of each global batch, and numbers that a hook draws behind each epoch; saves after the first."""

    def __init__(self, path: str = "") -> None:
        self.path, self.losses = path, list[float]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"].detach().clone()
        if trainer.world_size > 1:
            dist.all_reduce(loss)
            loss /= trainer.world_size
        self.losses.append(float(loss))

    def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
        draws = (torch.rand(1).item(), random.random(), np.random.random())
        self.losses += [float(each) for each in draws]
        if self.path and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def saved(strategy: str, num_ranks: int, path: str) -> list[float]:
    """Two epochs; a checkpoint after the first in `path`, and after the second in `path`.end. Losses and draws."""
    return _fit(strategy, num_ranks, Losses(path), 3, f"{path}.end")


def resumed(strategy: str, num_ranks: int, path: str, end: str) -> list[float]:
    """The second epoch from a checkpoint, beginning with other weights; its end is saved in `end`."""
    return _fit(strategy, num_ranks, Losses(), 11, end, ckpt_path=path)


def _fit(strategy: str, num_ranks: int, losses: Losses, seed: int, end: str, **kwargs: Any) -> list[float]:
    L.seed_everything(seed, verbose=False)
    trainer = trainer_for(strategy, num_ranks, max_epochs=2, callbacks=[losses], gradient_clip_val=0.5)
    readers = 1 if strategy == "auto" else trainer.strategy.degrees.data  # type: ignore[attr-defined]
    trainer.fit(CASES[CASE]("adamw"), loader(readers, EPOCH, CASE), **kwargs)
    trainer.save_checkpoint(end)
    return losses.losses


def equal_contents(ours: Any, theirs: Any, path: str = "") -> float:
    """The largest difference of all numbers in two checkpoints, whose structure has to be the same."""
    if isinstance(theirs, torch.Tensor):
        assert ours.shape == theirs.shape, path
        assert ours.dtype == theirs.dtype, path
        return float((ours.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
    if hasattr(theirs, "items"):
        assert set(ours) == set(theirs), (path, set(ours) ^ set(theirs))
        return max([equal_contents(ours[key], theirs[key], f"{path}.{key}") for key in theirs], default=0.0)
    if isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), path
        pairs = zip(ours, theirs, strict=True)
        return max([equal_contents(a, b, f"{path}.{index}") for index, (a, b) in enumerate(pairs)], default=0.0)
    assert ours == theirs, path
    return 0.0
