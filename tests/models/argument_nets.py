"""Networks of such layers, and what they give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.argument_layers import (
    HEAD,
    SIZES,
    WIDTH,
    Biased,
    Buffers,
    ByName,
    Checkpointed,
    Complex,
    Conditioned,
    Counting,
    FromStart,
    FromTheFirst,
    HardHeads,
    HiddenByName,
    Kept,
    KeptAsBuffers,
    Learned,
    Masked,
    MayBeConditioned,
    MixedBehindAGate,
    Pair,
    Picky,
    Positions,
    Remembering,
    SoftBehindAGate,
    Waves,
    angles,
    waves,
)
from tests.models.cases import LENGTH, VOCABULARY, Case, next_token_loss


class Net(Case):
    """Three layers of a kind; `given` says what they take beside hidden states."""

    layer: type[nn.Module]
    sizes: Sequence[int] = (LENGTH,)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.side = nn.Embedding(4, WIDTH)

    def given(self, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
        return ()

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.sizes[self.global_step % len(self.sizes)]]
        x = self.tokens(tokens)
        given = self.given(x, tokens)
        for layer in self.layers:
            x = layer(x, **given[0]) if given and isinstance(given[0], dict) else layer(x, *given)
        return next_token_loss(self.head(x), tokens)


class ConditionedToTheEnd(Net):
    """The condition is used behind the last layer, too."""

    layer = Conditioned

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.last = nn.Linear(WIDTH, WIDTH)

    def loss(self, tokens: Tensor) -> Tensor:
        x, c = self.tokens(tokens), self.side(tokens[:, 0] % 4)
        for layer in self.layers:
            x = layer(x, c)
        return next_token_loss(self.head(x * self.last(F.silu(c))[:, None]), tokens)


class HandingOn(Net):
    layer = Biased

    def loss(self, tokens: Tensor) -> Tensor:
        x, bias = self.tokens(tokens), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return next_token_loss(self.head(x), tokens)


class Decoder(Net):
    """The layers read what an encoder computes; only the decoder is cut."""

    layer = Remembering

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.encoder = nn.ModuleList(Buffers() for _ in range(2))

    def given(self, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
        memory = self.tokens(tokens.flip(1))
        for layer in self.encoder:
            memory = layer(memory)
        return (memory,)


class GivesHiddenByName(Net):
    layer = HiddenByName

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = waves(x.shape[1])
        for layer in self.layers:
            x = layer(hidden=x, scale=0.5, cos=cos, sin=sin)
        return next_token_loss(self.head(x), tokens)


class ChangesTheCondition(ConditionedToTheEnd):
    """Four layers; the last one is given what is computed between two layers of its stage."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers.append(Conditioned())

    def loss(self, tokens: Tensor) -> Tensor:
        x, c = self.tokens(tokens), self.side(tokens[:, 0] % 4)
        for index, layer in enumerate(self.layers):
            x = layer(x, c * (1 + index))
        return next_token_loss(self.head(x), tokens)


def net(kind: type[nn.Module], given: Callable[..., tuple[Any, ...]] | None = None, *, sizes: Any = None) -> type[Net]:
    return type(
        f"Net{kind.__name__}",
        (Net,),
        {"layer": kind, "given": given or Net.given, "sizes": sizes or Net.sizes, "__module__": __name__},
    )


def table(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (torch.polar(torch.ones(LENGTH, HEAD // 2), angles(LENGTH)),)


def from_start(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (0, torch.polar(torch.ones(40, HEAD // 2), angles(40)), None)


def both(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return waves(x.shape[1])


def pair(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (waves(x.shape[1]),)


def positions(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (torch.arange(x.shape[1]).expand(x.shape[0], -1),)


def causal(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (torch.ones(x.shape[1], x.shape[1]).tril().expand(x.shape[0], -1, -1),)


def condition(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (self.side(tokens[:, 0] % 4),)


def memory(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (self.side(tokens[:, :8] % 4),)


def first(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (x, *waves(x.shape[1]))


def by_name(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    cos, sin = waves(x.shape[1])
    return ({"temb": tokens[:, :6] / VOCABULARY, "cos": cos, "sin": sin},)


def long_waves(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return waves(2 * LENGTH)


class Deep(ConditionedToTheEnd):
    """Four layers: a rank may have two stages, and hand on from one to the other."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers.append(Conditioned())


class Twelve(Net):
    """More layers than torch compiles versions of a function, and heads that are written into `forward`."""

    layer = Buffers

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(HardHeads() for _ in range(12))


class OnlyTheLast(ConditionedToTheEnd):
    """Of three stages, the one between is given no condition."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(MayBeConditioned() for _ in range(4))

    def loss(self, tokens: Tensor) -> Tensor:
        x, c = self.tokens(tokens), self.side(tokens[:, 0] % 4)
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return next_token_loss(self.head(self.layers[-1](x, c)), tokens)


class UsesTheMiddle(ConditionedToTheEnd):
    """The loss takes the hidden states with which the last stage begins."""

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        c = torch.ones(x.shape[0], WIDTH)
        for layer in self.layers:
            before, x = x, layer(x, c)
        return next_token_loss(self.head(x) + self.head(before), tokens)


class Complicated(ConditionedToTheEnd):
    """Layers take complex numbers that are computed with parameters."""

    layer = Complex

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        turns = torch.polar(torch.ones(LENGTH, HEAD // 2), angles(LENGTH) * self.side.weight.mean())
        for layer in self.layers:
            x = layer(x, turns)
        return next_token_loss(self.head(x), tokens)


NETS = {
    "complex": net(Complex, table, sizes=SIZES),  # a table that is first as long as the sequence, and then longer
    "from_start": net(FromStart, from_start),
    "waves": net(Waves, both, sizes=SIZES),
    "square_waves": net(Waves, both, sizes=(HEAD, LENGTH, HEAD, 8, HEAD)),  # as many positions as features of a head
    "pair": net(Pair, pair),
    "hidden_by_name": GivesHiddenByName,
    "positions": net(Positions, positions),
    "masked": net(Masked, causal),
    "conditioned": net(Conditioned, condition),
    "remembering": net(Remembering, memory),
    "by_name": net(ByName, by_name),
    "from_the_first": net(FromTheFirst, first),
    "conditioned_to_the_end": ConditionedToTheEnd,
    "handing_on": HandingOn,
    "decoder": Decoder,
    "counting": net(Counting, sizes=SIZES),
    "learned": net(Learned, sizes=SIZES),
    "buffers": net(Buffers, sizes=SIZES),
    "checkpointed": net(Checkpointed),
    "soft_behind_a_gate": net(SoftBehindAGate),
}

FURTHER_NETS: dict[str, type[Case]] = {
    "deep": Deep,
    "twelve": Twelve,
    "uses_the_middle": UsesTheMiddle,
    "changes_the_condition": ChangesTheCondition,
    "only_the_last": OnlyTheLast,
    "picky": net(Picky, long_waves),
}
"""For one of the tests alone."""

REFUSED_NETS = {
    "kept": (net(Kept, sizes=SIZES), "changes what layers.0 (Kept) computes"),
    "kept_as_buffers": (net(KeptAsBuffers), "changes what layers.0 (KeptAsBuffers) computes"),
    "mixed_behind_a_gate": (net(MixedBehindAGate), "changes what layers.0 (MixedBehindAGate) computes"),
}

globals().update({module.__name__: module for module in (*NETS.values(), *(kind for kind, _ in REFUSED_NETS.values()))})
