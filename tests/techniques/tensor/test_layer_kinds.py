"""Layers of several kinds in one stack: those that have no linear maps, and those of one kind that are given others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.module.recorded_calls import LayerCall
from lightning_parallel.techniques.tensor.plan import plan_tensor
from tests.data import batches
from tests.models.cases import Block
from tests.models.stacked import WIDTH, Hybrid
from tests.parity import TOLERANCE, once, train_module, worst


class Scaled(nn.Module):
    """A layer without a linear map, as the norms between the branches of x-transformers are."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class ScaledBetween(Hybrid):
    """Such layers between others."""

    def __init__(self) -> None:
        super().__init__("adamw", (Scaled, Block, Scaled, Block))


class OfChannels(nn.Module):
    """Two maps of one size, behind a norm of channels, of which layers have different numbers."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.GroupNorm(1, channels), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TwoSizes(nn.Module):
    """Layers of one class, with 4 channels and with 6."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([OfChannels(4), OfChannels(6)])


def test_layers_without_maps_stay_whole_and_stop_nothing() -> None:
    module = ScaledBetween()
    structure = find_layers(module, ["layers"])
    assert structure.layers == ("layers.0", "layers.1", "layers.2", "layers.3")
    found = plan_tensor(module, structure, None, degree=2)
    assert found.violations == []
    assert {path.split(".")[1] for path in found.roles} == {"1", "3"}


def trained(name: str, size: int) -> Any:
    return train_module(ScaledBetween, batches("byte_gpt", 1, 3), name, size)


def test_parity_beside_layers_without_maps(ranks: Any) -> None:
    assert worst(ranks(2).run(trained, "tp_custom:layers=layers", 2)[0], once(trained, "auto", 1)) < TOLERANCE


def test_a_call_is_one_of_its_own_layer() -> None:
    """A step may have called the second of a kind alone, which is given another shape than the first."""
    module = TwoSizes()
    calls = {"layers.1": LayerCall((torch.zeros(2, 6, 8),), {})}
    found = plan_tensor(module, find_layers(module), None, degree=2, calls=calls)
    assert found.violations == []
    roles = {"up": "colwise", "down": "rowwise"}
    assert found.roles == {f"layers.{i}.{name}": role for i in range(2) for name, role in roles.items()}
