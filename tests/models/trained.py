"""Modules that freeze and thaw parameters while a step runs, and hooks that change what the next step reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Block, optimizer_of
from tests.models.user_code import Tokens


class Trained(Tokens):
    """Momentum moves what has a gradient of zeros, and leaves what has none."""

    def configure_optimizers(self) -> Any:
        return optimizer_of("sgd", list(self.parameters()))


class FreezesInTheStep(Trained):
    """From its third step on, all norms are frozen, that behind the layers among them."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            for name, parameter in self.model.named_parameters():
                if "norm" in name:
                    parameter.requires_grad_(False)
        return super().training_step(batch, batch_idx)


class FreezesBehindForward(Trained):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.model.norm.requires_grad_(False)
            self.model.blocks[1].requires_grad_(False)
        return loss


class FreezesBeforeBackward(Trained):
    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_step == 1:
            self.model.head.requires_grad_(False)
            self.model.norm.requires_grad_(False)


class FreezingBlock(Block):
    """Freezes its first map where it is told to, before it uses it."""

    is_to_freeze = False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_to_freeze:
            self.mlp[0].requires_grad_(False)
        return super().forward(x)


class FreezesInsideOfLayers(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(FreezingBlock() for _ in range(3))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for block in self.model.blocks:
            block.is_to_freeze = batch_idx == 1  # type: ignore[assignment]
        return super().training_step(batch, batch_idx)


class TakesTurns(Trained):
    """Trains one part of the parameters after the other, which each step finds by itself."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad = ("norm" in name or "mlp" in name) == (batch_idx % 2 == 0)
        return super().training_step(batch, batch_idx)


class TakesTurnsByLists(Trained):
    """The same by references from before training, which are shards where parameters are sharded."""

    def on_train_start(self) -> None:
        model = self.model
        self.__dict__["parts"] = [[*model.tokens.parameters(), *model.norm.parameters()], [*model.blocks.parameters()]]

    def choose(self, batch_idx: int) -> None:
        for number, part in enumerate(self.__dict__["parts"]):
            for parameter in part:
                parameter.requires_grad_(number == batch_idx % 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.choose(batch_idx)
        return super().training_step(batch, batch_idx)


class TakesTurnsByAssigning(TakesTurnsByLists):
    def choose(self, batch_idx: int) -> None:
        for number, part in enumerate(self.__dict__["parts"]):
            for parameter in part:
                parameter.requires_grad = number == batch_idx % 2


class TakesTurnsInAHook(TakesTurnsByLists):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.choose(batch_idx)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return Tokens.training_step(self, batch, batch_idx)


class ReadsWhatHooksSet(Trained):
    """A number, an entry and a buffer that hooks change between microsteps, and a weight that they decay."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.table = {"seen": 0}
        self.register_buffer("height", torch.ones(()))
        self.gain = nn.Parameter(torch.ones(4), requires_grad=False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale = 1.0 + batch_idx

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.scale * loss + 0.1 * self.table["seen"] + self.height * self.gain.mean() * loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.table["seen"] += 1
        self.height += 0.5  # type: ignore[misc, operator]
        with torch.no_grad():
            self.gain.mul_(0.5)


class Manual(Trained):
    """Optimizes by itself, and freezes between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.model.norm.requires_grad_(False)
            self.model.blocks[1].requires_grad_(False)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class ManualKeepsGradients(Manual):
    """The same, where gradients of the step before are still there."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = Trained.training_step(self, batch, batch_idx)
        if batch_idx == 1:
            self.model.norm.requires_grad_(False)
        self.manual_backward(loss)
        optimizer.step()
        if batch_idx == 2:
            optimizer.zero_grad()
        return loss.detach()


class ManualTurns(Trained):
    """Trains one half and then the other in each step, of which one is frozen when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model.blocks.requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inner, outer = self.optimizers()  # type: ignore[misc, union-attr]
        halves = [self.model.blocks], [self.model.tokens, self.model.head]
        for optimizer, (own, others) in ((outer, halves[::-1]), (inner, halves)):
            for trains, modules in ((True, own), (False, others)):
                for each in modules:
                    each.requires_grad_(trains)
            loss = super().training_step(batch, batch_idx)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        outer = [*self.model.tokens.parameters(), *self.model.head.parameters()]
        return [optimizer_of("sgd", list(part)) for part in (self.model.blocks.parameters(), outer)]
