"""Modules with more layers than there is memory for twice, and what a step of theirs leaves behind."""

from __future__ import annotations

from typing import Any

import torch
import torchmetrics
from torch import Tensor, nn

from tests.models.cases import GPT, ByteGPT, next_token_loss
from tests.models.faults import PenaltyOfLayers

DEPTH = 6


class Deep(ByteGPT):
    """Six layers, and a parameter that is not sharded."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model = GPT(depth=DEPTH)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self(tokens) * self.temperature, tokens)


class DeepWithHabits(Deep):
    """Draws, logs, prints, counts, collects, keeps a running buffer and a metric."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.register_buffer("running", torch.zeros(()))
        self.mean = torchmetrics.MeanMetric()
        self.factor, self.num_steps = 1.0, 0
        self.losses: list[float] = []
        self.drop = nn.Dropout(0.1)
        self.drawn: list[float] = []

    def on_train_start(self) -> None:
        self.factor = 0.5

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.model.tokens(tokens)
        for block in self.model.blocks:
            x = self.drop(block(x))
        return self.factor * next_token_loss(self.model.head(self.model.norm(x)), tokens)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        loss = self.loss(*batch)
        self.num_steps += 1
        print(f"step {self.num_steps}")
        self.losses.append(float(loss))
        self.running += 1
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss}

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before", loss.detach())

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.drawn.append(float(torch.rand(())))


class OneLayerAtATime(Deep):
    """Asks for its layers by number, as many as it has been built with."""

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.model.tokens(tokens)
        for index in range(DEPTH):
            x = self.model.blocks[index](x)
        return next_token_loss(self.model.head(self.model.norm(x)), tokens)


class FlatAndDeep(ByteGPT):
    """The layers stand between others in one container."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        whole = GPT(depth=DEPTH)
        self.model = nn.Sequential(whole.tokens, *whole.blocks, whole.norm, whole.head)


class DeepPenalty(PenaltyOfLayers):
    """A penalty of each of six layers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(PenaltyOfLayers().model.blocks[0] for _ in range(DEPTH))
