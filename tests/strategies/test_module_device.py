"""The device that a module names."""

from __future__ import annotations

import lightning as L
import torch
from torchmetrics import MeanMetric

from lightning_parallel.strategies.module_device import set_module_device


class Measured(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()


def test_a_module_knows_its_device() -> None:
    module = Measured()
    set_module_device(module, torch.device("meta"))
    assert module.device.type == module.mean.device.type == module.mean.mean_value.device.type == "meta"
