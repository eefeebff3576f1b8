"""Layers without attention, in a stack that is run on parts of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.data import batches
from tests.models.cases import Block
from tests.models.stacked import WIDTH, Hybrid, Mixer
from tests.parity import TOLERANCE, once, train_module, worst
from tests.rank_pool import RankError


class Fourier(nn.Module):
    """A layer that mixes positions without any weight."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.fft.fft(self.norm(x), dim=1).real)


class ShiftedByZero(nn.Module):
    """A convolution over positions that begins as if it were not there, with all its gradients."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.along, self.scale = nn.Conv1d(width, width, 3, padding=1, bias=False), nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.along.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.along(x.mT).mT


class Experts(nn.Module):
    """Maps between which a softmax chooses for each position."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.router, self.maps = nn.Linear(width, 2), nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).softmax(-1)
        return x + sum(chosen[..., i : i + 1] * each(x) for i, each in enumerate(self.maps))


class ByHand(nn.Module):
    """Attention that is not torch's."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.down = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down((y @ y.mT).softmax(-1) @ y)


class Late(Block):
    """A layer whose attention comes in with the third step."""

    num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.num_steps >= 2:
            return super().forward(x)
        return x + self.mlp(self.norm2(x))


class WithExperts(Hybrid):
    """Attention, and experts."""

    def __init__(self) -> None:
        super().__init__("adamw", (Block, Experts, Block, Experts))


class WithOwn(Hybrid):
    """Attention, and some that is not torch's."""

    def __init__(self) -> None:
        super().__init__("adamw", (Block, ByHand, Block, ByHand))


class LateAttention(Hybrid):
    """Layers whose attention was not there when they were compared."""

    def __init__(self) -> None:
        super().__init__("adamw", (Late, Late, Late, Late))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for each in self.modules():
            if isinstance(each, Late):
                each.num_steps = batch_idx


class OnlyMixers(Hybrid):
    """A stack in which no layer has attention."""

    def __init__(self) -> None:
        super().__init__("adamw", (Mixer, Mixer, Mixer, Mixer))


class MixersFirst(Hybrid):
    """A stack whose first layer has no attention, by which the dimension of positions is found."""

    def __init__(self) -> None:
        super().__init__("adamw", (Mixer, Block, Mixer, Block))


class WithFourier(Hybrid):
    """Attention, and a layer that needs all positions."""

    def __init__(self) -> None:
        super().__init__("adamw", (Block, Fourier, Block, Fourier))


class FourierFirst(Hybrid):
    """The same, the other way around."""

    def __init__(self) -> None:
        super().__init__("adamw", (Fourier, Block, Fourier, Block))


class WithShift(Hybrid):
    """Attention, and a convolution."""

    def __init__(self) -> None:
        super().__init__("adamw", (Block, ShiftedByZero, Block, ShiftedByZero))


def trained(make: Any, name: str, size: int) -> Any:
    return train_module(make, batches("byte_gpt", 1, 3), name, size)


@pytest.mark.parametrize("make", [OnlyMixers, MixersFirst, WithExperts])
@pytest.mark.parametrize("name", ["cp_custom", "cp_custom:context_attention=ring"])
def test_what_maps_each_position_by_itself_is_right_on_a_part(ranks: Any, make: Any, name: str) -> None:
    ours = ranks(2).run(trained, make, name, 2)[0]
    assert worst(ours, once(trained, make, "auto", 1)) < TOLERANCE


@pytest.mark.parametrize("make", [WithFourier, FourierFirst, WithShift])
def test_what_needs_other_positions_is_refused(ranks: Any, make: Any) -> None:
    with pytest.raises(RankError, match="computes no attention by itself either"):
        ranks(2).run(trained, make, "cp_custom", 2)


def test_attention_that_is_not_torchs_is_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="attn_implementation='sdpa'"):
        ranks(2).run(trained, WithOwn, "cp_custom", 2)


def test_attention_that_was_not_compared_is_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="calls scaled_dot_product_attention, and did not when it was compared"):
        ranks(2).run(trained, LateAttention, "cp_custom", 2)
