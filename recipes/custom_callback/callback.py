"""A callback that calls the module, for models on bytes."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override


class BitsOfText(Callback):
    """Logs as `text_bpb`, after each validation, the bits per byte that the module needs for one text.

    `module.model` turns bytes, int64 of shape (1, length), into logits of the byte after each, (1, length, 256).

    Args:
        text: What is looked at.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    @override
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        tokens = torch.tensor([list(self.text.encode())], device=pl_module.device)
        # On all ranks: the call gathers parameters from all of them. Behind `if trainer.is_global_zero:` it would wait.
        logits = pl_module.model(tokens)
        nats = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
        self.log("text_bpb", nats / math.log(2), prog_bar=True)
