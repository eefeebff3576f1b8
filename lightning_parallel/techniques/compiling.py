"""Compile the layers of the stack, each in place.

Layers of one class share one compiled `forward`, so the number of graphs does not grow with depth. Hooks of a layer,
including those that gather its parameters, stay outside of the graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from lightning_parallel import _torch
from lightning_parallel.module.kv_cache import without_fresh_cache

CHOICES = ("none", "layers")


def compile_violations(compile: str) -> list[str]:
    """Reasons why `compile` is not a choice; empty if it is."""
    return [] if compile in CHOICES else [f"compile={compile!r} is unknown; possible: {', '.join(CHOICES)}"]


def apply_compile(layers: Sequence[nn.Module], *, budget: float = 1.0, backend: Any = "inductor") -> None:
    """Compile the `forward` of `layers`, in place. Names in the state dict stay.

    Args:
        layers: The layers of the stacks.
        budget: The share of activations that backward may keep, from 0 to 1; the compiler chooses which.
        backend: As `torch.compile` takes it.
    """
    for layer in layers:
        layer.__class__ = _compiled(cast(Any, type(layer)), budget, backend)


@functools.cache
def _compiled(cls: type[Any], budget: float, backend: Any) -> type[nn.Module]:
    compiled = torch.compile(cls.forward, backend=backend)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args = tuple(without_fresh_cache(self, args))
        kwargs = dict(zip(kwargs, without_fresh_cache(self, kwargs.values()), strict=True))
        with _torch.modes.activation_budget(budget):
            return compiled(self, *args, **kwargs)

    return _torch.modules.subclass_like(cls, forward)
