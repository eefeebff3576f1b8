"""Layers that put a loss of their own elsewhere than into their results: into arguments, variables and their model."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Block, next_token_loss
from tests.models.pipelined import Deep

_LOSSES: list[Any] = []
_LOSS: ContextVar[Any] = ContextVar("_LOSS", default=0.0)


class Holder:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.loss: Any = 0.0
        self.losses: list[Any] = []


@dataclass
class Record:
    loss: Any = 0.0
    losses: list[Any] = field(default_factory=list)


class Leaving(Block):
    """Puts the mean square of its output where `leave` does."""

    leave: Callable[..., None]

    def forward(self, x: Tensor, *given: Any, losses: list[Any] | None = None) -> Tensor:
        x = super().forward(x)
        type(self).leave(self, x.square().mean(), *given, *(() if losses is None else (losses,)))
        return x


class LeavesLosses(Deep):
    """Adds the losses that its layers leave; `begin` makes what they are given, and `total` adds up."""

    begin: Callable[..., tuple[Any, ...]] = staticmethod(lambda module: ())
    total: Callable[..., Any]
    layer: type[Leaving]
    is_by_name = False

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(self.layer() for _ in range(4))
        self.losses: list[Any] = []
        for block in self.model.blocks:
            block.__dict__["model"] = [self]

    def loss(self, tokens: Tensor) -> Tensor:
        given = type(self).begin(self)
        x = self.model.tokens(tokens)
        for block in self.model.blocks:
            x = block(x, losses=given[0]) if self.is_by_name else block(x, *given)
        loss = next_token_loss(self.model.head(self.model.norm(x)), tokens)
        return loss + 0.1 * type(self).total(self, *given)


def leaving(leave: Callable[..., None], begin: Any, total: Any, *, is_by_name: bool = False) -> type[LeavesLosses]:
    """A model whose layers leave their losses in that way."""
    layer = type("Layer", (Leaving,), {"leave": staticmethod(leave)})
    members = {"layer": layer, "begin": staticmethod(begin), "total": staticmethod(total), "is_by_name": is_by_name}
    return type("Leaves", (LeavesLosses,), members)


def _put(layer: Any, loss: Any, entries: dict[str, Any]) -> None:
    entries.setdefault("losses", []).append(loss)
    entries["sum"] = entries.get("sum", 0.0) + loss
    entries.setdefault("inner", {})["last"] = loss


def _note(layer: Any, loss: Any, entries: list[Any], counts: dict[str, int]) -> None:
    entries.append((2.0, loss))
    counts["layers"] = counts.get("layers", 0) + 1


def _add(layer: Any, loss: Any, holder: Any) -> None:
    holder.loss = holder.loss + loss
    holder.losses.append(loss)


def _cleared(module: Any) -> tuple[Any, ...]:
    _LOSSES.clear()
    module.losses.clear()
    _LOSS.set(0.0)
    return ()


LEAVING: dict[str, type[LeavesLosses]] = {
    "list": leaving(lambda layer, loss, losses: losses.append(loss), lambda _: ([],), lambda _, losses: sum(losses)),
    "list_by_name": leaving(
        lambda layer, loss, losses: losses.append(loss),
        lambda _: ([],),
        lambda _, losses: sum(losses),
        is_by_name=True,
    ),
    "numbers": leaving(
        lambda layer, loss, losses: losses.append(float(loss.detach())),
        lambda _: ([],),
        lambda _, losses: 0.01 * len(losses),
    ),
    "dict": leaving(
        _put, lambda _: ({},), lambda _, found: sum(found["losses"]) + found["sum"] + found["inner"]["last"]
    ),
    "nested": leaving(
        _note, lambda _: ([], {}), lambda _, found, counts: sum(a * b for a, b in found) / counts["layers"]
    ),
    "object": leaving(_add, lambda _: (Holder(),), lambda _, holder: holder.loss + sum(holder.losses)),
    "record": leaving(_add, lambda _: (Record(),), lambda _, record: record.loss + sum(record.losses)),
    "model": leaving(
        lambda layer, loss: layer.model[0].losses.append(loss), _cleared, lambda module: sum(module.losses)
    ),
    "numbers_of_model": leaving(
        lambda layer, loss: layer.model[0].losses.append(float(loss.detach())),
        _cleared,
        lambda module: 0.01 * len(module.losses),
    ),
    "attribute": leaving(
        lambda layer, loss: setattr(layer, "own", loss),
        _cleared,
        lambda module: sum(b.own for b in module.model.blocks),
    ),
}


def _hand_on(layer: Any, loss: Any, states: dict[str, Any]) -> None:
    states["loss"] = states.pop("other", 0.0) + loss
    states["other"] = 0.5 * states.pop("last", 0.0) + loss
    if len(states) < 3:
        states["last"] = 2 * loss


LEAVING["popped"] = leaving(
    lambda layer, loss, losses: losses.append((losses.pop() if losses else 0.0) + loss),
    lambda _: ([],),
    lambda _, losses: sum(losses) * len(losses),
)
LEAVING["popped_of_two"] = leaving(
    lambda layer, loss, losses: losses.extend((loss, losses.pop(0), 2 * losses.pop(0) + loss)),
    lambda _: ([0.5, 1.0],),
    lambda _, losses: sum(losses) + 0.1 * len(losses),
)
LEAVING["popped_by_key"] = leaving(
    _hand_on, lambda _: ({},), lambda _, states: sum(states.values()) + 0.1 * len(states)
)
LEAVING["twice"] = leaving(
    lambda layer, loss, losses, same: (losses.append(loss), same.append(2 * loss)),
    lambda module: (module.losses.clear(), (module.losses, module.losses))[1],
    lambda module, *_: sum(module.losses) + 0.1 * len(module.losses),
)
LEAVING["long"] = leaving(
    lambda layer, loss, losses: losses.append(loss),
    lambda _: ([0.0] * 4095,),
    lambda _, losses: sum(losses) + 0.001 * len(losses),
)


class OfFile(LeavesLosses):
    """Layers append to a list of their file, and add to a context variable."""

    class layer(Leaving):  # noqa: N801
        def forward(self, x: Tensor, *given: Any, losses: list[Any] | None = None) -> Tensor:
            x = Block.forward(self, x)
            _LOSSES.append(x.square().mean())
            _LOSS.set(_LOSS.get() + x.abs().mean())
            return x

    begin = staticmethod(_cleared)
    total = staticmethod(lambda module: torch.stack(_LOSSES).sum() + _LOSS.get())


LEAVING["file"] = OfFile


class Counting(Block):
    """Counts its calls in a number and in a buffer, by which it weights its output; keeps a length."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.length = 0, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        self.num_calls += 1
        self.count += 0.5  # type: ignore[operator, misc]
        return super().forward(x) * (1 + 0.01 * self.num_calls + 0.01 * self.count + 0.001 * self.length)


class CountsLater(Counting):
    """In a buffer, which nothing depends on."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1  # type: ignore[operator, misc]
        return Block.forward(self, x)


class KeepsLength(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        return Block.forward(self, x) * (1 + 0.001 * self.length)


class OfCounting(Deep):
    kind: type[Counting] = Counting

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(self.kind() for _ in range(4))


class OfCountingLater(OfCounting):
    kind = CountsLater


class OfKeptLength(OfCounting):
    kind = KeepsLength
