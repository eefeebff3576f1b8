"""The device attributes of a LightningModule, besides its parameters and buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torchmetrics import Metric

from lightning_parallel import _lightning

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


def set_module_device(module: LightningModule, device: torch.device) -> None:
    """Do what ``module.to(device)`` does besides moving tensors, which go there shard by shard.

    ``module.device`` says where the module is, Lightning logs numbers there, and metrics keep their state there.

    Args:
        module: The module, whose parameters and buffers are on `device` already, or offloaded.
        device: This rank's device.
    """
    _lightning.set_known_device(module, device)
    for child in module.modules():
        if isinstance(child, Metric):
            child.to(device)
