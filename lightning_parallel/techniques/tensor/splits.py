"""Description of how tensor parallel splits each linear map: roles, shapes and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure
from lightning_parallel.techniques.tensor.linear_maps import is_transposed, linear_maps


@dataclass(frozen=True)
class MapSplit:
    """One linear map of a layer, or one `nn.MultiheadAttention`, or one table of tokens.

    Args:
        layer: The path of its layer; empty for a table outside of the layers.
        name: Its path in the layer, or in the module.
        role: ``"colwise"``, ``"rowwise"``, ``"heads"``, ``"vocab"`` or ``"whole"``.
        shape: The shape of its weight; the number of heads for ``"heads"``; empty where it has neither.
        local_shape: The same for one rank's part.
        packed: For ``"heads"``, the number of packed weights that are gathered in each forward.
    """

    layer: str
    name: str
    role: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    packed: int = 0

    @property
    def closes_branch(self) -> bool:
        """Whether the results of the ranks are added up behind it."""
        return self.role in ("rowwise", "heads")

    def __str__(self) -> str:
        """Role and shapes, such as ``colwise, [8, 4] -> [4, 4]``."""
        if self.role == "heads":
            return f"heads, {self.shape[0]} -> {self.local_shape[0]}"
        if not self.shape:
            return self.role
        changed = f" -> {list(self.local_shape)}" if self.local_shape != self.shape else ""
        return f"{self.role}, {list(self.shape)}{changed}"


def describe_splits(
    module: nn.Module, structure: ModuleStructure, roles: Mapping[str, str], tables: list[str], size: int
) -> tuple[MapSplit, ...]:
    """Describe the split of every linear map of the layers, and of the tables.

    Args:
        module: The whole module.
        structure: Its layer stacks.
        roles: Path of a map in the module -> its role.
        tables: Paths of embeddings and heads that are split by tokens.
        size: Ranks that share a matrix product.
    """
    of_layers = (
        _describe(layer, name, linear, roles.get(f"{layer}.{name}", "whole"), size)
        for layer in structure.layers
        for name, linear in linear_maps(module.get_submodule(layer))
    )
    return (*of_layers, *(_describe("", path, module.get_submodule(path), "vocab", size) for path in tables))


def _describe(layer: str, name: str, linear: Any, role: str, size: int) -> MapSplit:
    if role == "heads":
        packed = sum(getattr(linear, each) is not None for each in ("in_proj_weight", "in_proj_bias"))
        return MapSplit(layer, name, role, (linear.num_heads,), (linear.num_heads // size,), packed)
    if not hasattr(linear, "weight"):
        return MapSplit(layer, name, role, (), ())
    shape = tuple(linear.weight.shape)
    local = list(shape)
    if role == "vocab":
        local[0] //= size
    elif role != "whole":
        local[int((role == "colwise") == is_transposed(linear))] //= size
    return MapSplit(layer, name, role, shape, tuple(local))
