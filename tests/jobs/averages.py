"""An average of the weights that is kept in one process, and fits with ours."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_parallel import full_state_dict

DECAY = 0.7
"""Small, so that an update that is missing or made twice shows."""


class PlainAverage(Callback):
    """The reference, for one process: counts the optimizers' own steps, and averages every parameter."""

    def __init__(self, every_n_steps: int = 1, start_step: int = 0) -> None:
        self.every_n_steps, self.start_step = every_n_steps, start_step
        self.average: dict[str, Tensor] = {}
        self.val_losses: list[float] = []
        self.steps = 0
        self.stepped = False

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(self.note)

    def note(self, *args: Any) -> None:
        self.stepped = True

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if self.stepped:
            self.steps += 1
            if self.steps > self.start_step and self.steps % self.every_n_steps == 0:
                new = {name: p.detach().clone() for name, p in pl_module.named_parameters()}
                old = self.average or new
                self.average = {name: DECAY * old[name] + (1 - DECAY) * new[name] for name in new}
        self.stepped = False

    def full_state_dict(self, trainer: L.Trainer) -> dict[str, Tensor]:
        module = trainer.lightning_module
        first: dict[Tensor, str] = {}
        names = {n: first.setdefault(p, n) for n, p in module.named_parameters(remove_duplicate=False)}
        return {n: self.average.get(names.get(n, n), v).clone() for n, v in module.state_dict().items()}

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        other = copy.deepcopy(pl_module)
        other.load_state_dict(self.full_state_dict(trainer))
        with torch.no_grad():
            losses = [other.loss(*batch).item() for batch in trainer.val_dataloaders]
        self.val_losses.append(sum(losses) / len(losses))


class Observer(Callback):
    """Notes each validation's loss, and the first weights."""

    def __init__(self) -> None:
        self.val_losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.first = full_state_dict(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.val_losses.append(trainer.callback_metrics["val_loss"].item())
