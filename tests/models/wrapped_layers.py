"""Layers around which people put something of their own: functions, the compiler, objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Block, next_token_loss
from tests.models.pipelined import Deep


class OwnForwards(Deep):
    """``forward`` of each layer is replaced by a function around it, as methods for pretrained models do it."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for number, block in enumerate(self.model.blocks):
            block.forward = _scaled(block.forward, 1.0 + 0.1 * number)  # type: ignore[operator, arg-type]


def _scaled(forward: Any, by: float) -> Any:
    return lambda x: forward(x) * by


class CompiledLayers(Deep):
    """Each layer by itself, before any strategy sees it."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(torch.compile(b, backend="eager") for b in self.model.blocks)  # type: ignore


class CompilesItself(Deep):
    """Compiles a function around its layers when it needs it."""

    def loss(self, tokens: Tensor) -> Tensor:
        if "compiled" not in self.__dict__:
            self.__dict__["compiled"] = torch.compile(self.model.forward, backend="eager")
        return next_token_loss(self.__dict__["compiled"](tokens), tokens)


@dataclass
class Record:
    """What layers hand on."""

    hidden: Tensor
    penalty: Tensor


class OfRecords(Block):
    def forward(self, record: Record) -> Record:  # type: ignore[override]
        hidden = super().forward(record.hidden)
        return Record(hidden, record.penalty + hidden.square().mean())


class InRecords(Deep):
    """Layers take and return objects in place of hidden states."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(OfRecords() for _ in range(4))

    def loss(self, tokens: Tensor) -> Tensor:
        record = Record(self.model.tokens(tokens), torch.zeros(()))
        for block in self.model.blocks:
            record = block(record)
        return next_token_loss(self.model.head(self.model.norm(record.hidden)), tokens) + 0.1 * record.penalty


class Note:
    """What a layer says of its run; no container that torch knows."""

    def __init__(self, factor: float) -> None:
        self.factor = factor


class Noting(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Note]:  # type: ignore[override]
        return super().forward(x), Note(1.0 + 0.1 * x.shape[-1])


class BesideAnObject(Deep):
    """Layers return an object beside hidden states, with which the loss is weighted."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(Noting() for _ in range(4))

    def loss(self, tokens: Tensor) -> Tensor:
        hidden, factor = self.model.tokens(tokens), 0.1
        for block in self.model.blocks:
            hidden, note = block(hidden)
            factor *= note.factor
        return factor * next_token_loss(self.model.head(self.model.norm(hidden)), tokens)
