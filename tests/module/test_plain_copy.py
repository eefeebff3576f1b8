"""The plain copy of a module: what it refers to."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.module.plain_copy import PlainCopy


class Frozen(dict[str, Any]):
    """A dictionary that refuses changes by its own methods, as configurations of diffusers do."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("frozen")


class Configured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.config = Frozen(width=2, owner=lambda me=self: me)


def test_a_frozen_dictionary_is_copied_with_functions_of_the_copy() -> None:
    module = Configured()
    twin = PlainCopy(module, shared=(), device=torch.device("cpu")).module
    assert isinstance(twin.config, Frozen)
    assert twin.config["width"] == 2
    assert twin.config["owner"]() is twin
    assert module.config["owner"]() is module


class Wrapped(nn.Module):
    """Layers whose ``forward`` is wrapped from outside, as methods that add to pretrained layers do it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        plain, scaled, listed, nested = (layer.forward for layer in self.layers)
        self.layers[0].forward = lambda x: 2 * plain(x)  # type: ignore[method-assign, assignment]
        self.layers[1].forward = partial(_scaled, by=3.0, forward=scaled)  # type: ignore[method-assign, assignment]

        def run(x: Tensor, steps: Any = (listed,)) -> Tensor:
            return 4 * steps[0](x)

        self.layers[2].forward = run  # type: ignore[method-assign, assignment]

        def inner(x: Tensor) -> Tensor:
            return nested(x) if len(x) else inner(x[1:])

        self.layers[3].forward = lambda x: partial(_scaled, by=5.0, forward=inner)(x)  # type: ignore[method-assign]


def _scaled(x: Tensor, *, by: float, forward: Any) -> Tensor:
    return by * forward(x)


def test_functions_around_methods_compute_with_the_copy() -> None:
    module = Wrapped()
    twin = PlainCopy(module, shared=(), device=torch.device("cpu"))
    x = torch.ones(1, 2)
    expected = [layer(x).detach() for layer in module.layers]
    copied = twin.fill(module, lambda name, tensor: tensor)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for number, layer in enumerate(copied.layers):  # type: ignore[arg-type]
        assert torch.equal(layer(x), expected[number]), number
