"""Modules with schedules and rates of their own."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.cases import ByteGPT

STEPS = 8


def scheduler_of(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """A schedule of some six steps; cosine is the form that goes on from what it reads in the groups."""
    schedulers = torch.optim.lr_scheduler
    if name == "step":
        return schedulers.StepLR(optimizer, 2, 0.5)
    if name == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, STEPS)
    return schedulers.LambdaLR(optimizer, lambda step: 0.9**step)


class Scheduled(ByteGPT):
    scheduler = "lambda"
    is_tensor = False

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        rate = torch.tensor(0.01) if self.is_tensor else 0.01
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=rate, eps=1e-4)
        scheduler = {"scheduler": scheduler_of(self.scheduler, optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class SteppedSchedule(Scheduled):
    scheduler = "step"


class CosineSchedule(Scheduled):
    scheduler = "cosine"


class TensorRate(Scheduled):
    is_tensor = True
