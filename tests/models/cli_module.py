"""A module and its data as a recipe names them."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset


class Module(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = self.net(batch[0]).pow(2).mean()
        return self.last

    def on_train_end(self) -> None:
        print(f"last loss {float(self.last.detach()):.6f}")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, num_samples: int = 16) -> None:
        super().__init__()
        self.num_samples = num_samples

    def train_dataloader(self) -> Any:
        samples = torch.randn(self.num_samples, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(samples), batch_size=4)


class Layered(Module):
    """With a stack of layers."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)]
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        self.blocks = nn.ModuleList(layers)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net(batch[0])
        for block in self.blocks:
            x = x + block(x)
        self.last = x.pow(2).mean()
        return self.last


def count(batch: Any) -> int:
    return len(batch[0])


class Evaluated(Module):
    """With every entry point; what it sees in evaluation is kept in `SEEN`."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.net(batch[0]).pow(2).mean(), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch[0]).flatten()

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        SEEN.setdefault("predictions", []).extend(outputs.tolist())

    def on_train_end(self) -> None:
        SEEN["loss"] = [float(self.last.detach())]

    def on_validation_end(self) -> None:
        SEEN["val_loss"] = [float(self.trainer.callback_metrics["val_loss"])]

    def on_test_end(self) -> None:
        SEEN["test_loss"] = [float(self.trainer.callback_metrics["test_loss"])]


SEEN: dict[str, list[float]] = {}


class EvaluatedData(Data):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


class Failing(Evaluated):
    """Fails on one rank, or computes something else where it is sharded."""

    def __init__(self, on: int = -1, differs: bool = False) -> None:
        super().__init__()
        self.on, self.differs = on, differs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.global_rank == self.on:
            raise ValueError("no such sample")
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if self.differs and isinstance(self, FSDPModule) else loss
