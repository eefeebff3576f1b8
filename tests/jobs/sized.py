"""Modules whose batch size is searched, and fits of them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_parallel import full_state_dict
from lightning_parallel.callbacks.batch_size import BatchSizeFinder
from tests.data import data_of
from tests.models.cases import ByteGPT, optimizer_of
from tests.parity import Recorder, difference, trainer_for

SAMPLES = 96
LIMIT = 41_000


class Gauge:
    """Bytes of the tensors that a step holds; the same in every run."""

    peak = 0

    @classmethod
    def note(cls, *tensors: Tensor) -> None:
        cls.peak = max(cls.peak, sum(tensor.nbytes for tensor in tensors))

    @classmethod
    def read(cls, device: torch.device) -> int:
        peak, cls.peak = cls.peak, 0
        return peak


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Sized(ByteGPT):
    """Takes 10 kB and, a sample, 2 kB on rank 0 and 2.5 kB on the others."""

    def __init__(self, batch_size: int = 2, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.batch_size = batch_size

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        Gauge.note(torch.empty(2500), torch.empty(len(tokens), 500 + 125 * min(own_rank(), 1)))
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data_of("byte_gpt", SAMPLES, 1), batch_size=self.batch_size)


class Eventful(Sized):
    """Draws random numbers, counts, collects, keeps a metric and plans its schedule for the number of steps."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__(batch_size)
        self.dropout = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(4)
        self.mean = MeanMetric()
        self.seen: list[int] = []
        self.steps: list[int] = []
        self.sums: dict[str, float] = {}
        self.count = 0

    def on_train_start(self) -> None:
        self.offset = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        self.seen.append(batch_idx)
        self.steps.append(self.trainer.global_step)
        noise = self.dropout(torch.ones(len(batch[0]), 4))
        loss = super().training_step(batch, batch_idx) + 0.1 * self.norm(noise).mean() + 0.1 * noise.mean()
        self.sums["loss"] = self.sums.get("loss", 0.0) + float(loss.detach())
        self.mean.update(loss.detach())
        return loss + self.offset

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(5)
        data = data_of("byte_gpt", SAMPLES, 1)
        return DataLoader(data, batch_size=self.batch_size, shuffle=True, generator=generator)

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of("adamw", self.parameters())
        steps = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=int(steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class RunsOut(Sized):
    """Memory ends above ten samples, which no line through the peaks foretells."""

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        if len(tokens) > 10:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss


def train(strategy: str, num_ranks: int, make: Any, find: dict[str, Any] | None, **settings: Any) -> dict[str, Any]:
    """An epoch, after a search with `find`, or with the module's own size."""
    L.seed_everything(3, verbose=False)
    module = make()
    finder = None if find is None else BatchSizeFinder(**{"measure": Gauge.read, "memory_limit": LIMIT, **find})
    recorder = Recorder()
    trainer = trainer_for(strategy, num_ranks, callbacks=[recorder, *([finder] if finder else [])], **settings)
    trainer.fit(module)
    noted = [getattr(module, name, None) for name in ("seen", "steps", "sums", "count")]
    optimizer = trainer.optimizers[0]
    return {
        "size": finder.batch_size if finder else None,
        "peaks": finder.peaks if finder else None,
        "losses": recorder.outcome.losses,
        "initial": recorder.outcome.initial,
        "weights": full_state_dict(trainer),
        "noted": noted,
        "mean": float(module.mean.compute()) if hasattr(module, "mean") else None,
        "rates": [group["lr"] for group in optimizer.param_groups],
        "random": torch.rand(3).tolist(),
        "steps": trainer.global_step,
        "logged": sorted(trainer.callback_metrics),
    }


def assert_same_run(found: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Exactly: the same operations in the same order."""
    for key in ("losses", "noted", "mean", "rates", "random", "steps", "logged"):
        assert found[key] == fresh[key], key
    assert len(found["losses"]) > 2
    if fresh["weights"]:
        assert difference(found["initial"], fresh["initial"]) == 0
        assert difference(found["weights"], fresh["weights"]) == 0
        assert difference(found["weights"], found["initial"]) > 1e-3
