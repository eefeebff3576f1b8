"""The plain copy of a module: what it refers to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

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
