"""What counts as a linear map: torch's own, and a subclass that computes the same, with the same gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.techniques.tensor.linear_maps import linear_maps, unlike_linear
from tests.models.layered import Scaled
from tests.models.recorded_layers import Transposing


class Clamped(nn.Linear):
    """Differs where numbers are large."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).clamp(-50, 50)


class Quantized(nn.Linear):
    """Differs in its gradients only."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.detach(), self.weight, self.bias)


class NoisyInTraining(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.dropout(input, 0.5, self.training))


class Masked(nn.Linear):
    """Holds something beside weight and bias."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.register_buffer("mask", torch.ones(6, 8))

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight * self.mask, self.bias)


class OfSettings(Transposing):
    """What it computes depends on an attribute."""

    scale = 1.0

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Counting(Transposing):
    """Writes into a list of its own."""

    def __init__(self) -> None:
        super().__init__(8, 6)
        self.calls: list[int] = []

    def forward(self, input: Tensor) -> Tensor:
        self.calls.append(input.shape[-1])
        return super().forward(input)


def scaled_by_attribute() -> nn.Module:
    linear = OfSettings(8, 6)
    linear.scale = 0.5
    return linear


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(8, 6),
        lambda: Transposing(8, 6),
        lambda: Transposing(8, 6, bias=False),
        lambda: Transposing(8, 6, device="meta"),
        lambda: Transposing(8, 6, dtype=torch.bfloat16),
        lambda: OfSettings(8, 6),
        Counting,
    ],
)
def test_a_linear_map(make: Callable[[], nn.Module]) -> None:
    layer = nn.Sequential(make())
    state = torch.get_rng_state()
    assert [path for path, _ in linear_maps(layer)] == ["0"]
    assert unlike_linear(layer) == {}
    assert torch.equal(torch.get_rng_state(), state)
    assert getattr(layer[0], "calls", []) == []
    assert layer[0].weight.shape == (6, 8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(8, 6),
        lambda: Clamped(8, 6),
        lambda: Quantized(8, 6),
        lambda: NoisyInTraining(8, 6),
        lambda: NoisyInTraining(8, 6).eval(),
        Masked,
        scaled_by_attribute,
    ],
)
def test_another_map(make: Callable[[], nn.Module]) -> None:
    layer = nn.Sequential(make())
    state = torch.get_rng_state()
    assert list(linear_maps(layer)) == []
    assert list(unlike_linear(layer)) == ["0"]
    assert type(layer[0]).__name__ in unlike_linear(layer)["0"]
    assert torch.equal(torch.get_rng_state(), state)
