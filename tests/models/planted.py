"""Modules that are other ones on several ranks than in one process, each by a fault that people make."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import ByteGPT
from tests.models.pipelined import DeepTied


class Unties(DeepTied):
    """Embedding and head are one parameter in one process only."""

    def setup(self, stage: str) -> None:
        if self.trainer.world_size > 1:
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())


class DropsGradient(ByteGPT):
    """A hook that drops the gradient of one parameter, on several ranks."""

    def on_after_backward(self) -> None:
        gradient = self.model.head.weight.grad
        if self.trainer.world_size > 1 and gradient is not None:
            gradient.zero_()


class _Inside(nn.Module):
    """A layer that does something with its hidden states, of which it may have a part."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = layer, kind

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1], device=hidden.device, dtype=hidden.dtype)
        if self.kind == "positions":  # as rotary ones, counted from the start of what it is given
            hidden = hidden * torch.cos(0.1 * positions)[:, None]
        else:  # a causal mask, as long as what it is given
            mask = torch.ones(len(positions), len(positions)).tril().to(hidden)
            hidden = hidden + mask @ hidden / len(positions)
        result: Tensor = self.layer(hidden)
        return result


class CountsPositions(ByteGPT):
    """Layers that count positions by themselves."""

    kind = "positions"

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(_Inside(block, self.kind) for block in self.model.blocks)


class MakesMasks(CountsPositions):
    """Layers that make a mask by themselves."""

    kind = "mask"


class LosesSamples(ByteGPT):
    """Learns from the samples of rank 0 only: a loss that is zero elsewhere."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * float(self.global_rank == 0)
