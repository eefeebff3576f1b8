"""Layers that keep more than parameters and buffers in checkpoints: counters, scales, and what hooks add."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Block, ByteGPT


class Counting(Block):
    """Keeps how it was run in `get_extra_state`, as layers that compute in fp8 keep their scales."""

    def __init__(self) -> None:
        super().__init__()
        self.has_run = False
        self.scales = torch.zeros(3)
        self.factor = 1.0
        self.register_state_dict_post_hook(_add_entries)
        self.register_load_state_dict_pre_hook(_take_entries)

    def forward(self, x: Tensor) -> Tensor:
        self.has_run = True
        self.scales = torch.arange(3.0) + self.norm1.weight.numel()
        return super().forward(x) * self.factor

    def get_extra_state(self) -> dict[str, Any]:
        return {"has_run": self.has_run, "scales": self.scales, "factor": self.factor}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.has_run, self.scales, self.factor = state["has_run"], state["scales"], state["factor"]


def _add_entries(layer: Counting, entries: dict[str, Any], prefix: str, _: Any) -> None:
    entries[prefix + "version"] = 2 if layer.has_run else 1
    entries[prefix + "first"] = entries.pop(prefix + "norm1.weight")


def _take_entries(_: Any, entries: dict[str, Any], prefix: str, *args: Any) -> None:
    assert entries.pop(prefix + "version") == 2
    entries[prefix + "norm1.weight"] = entries.pop(prefix + "first")


class Counts(ByteGPT):
    """Saves itself at the end of the first epoch, in the middle of the fit."""

    file = ""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(Counting() for _ in range(4))

    def on_train_epoch_end(self) -> None:
        for number, block in enumerate(self.model.blocks):
            block.factor = 1.1 + 0.1 * number  # type: ignore[assignment]
        if self.file:
            self.trainer.save_checkpoint(self.file)


class Versioned(Block):
    """Says of which version it is, in words that it never takes back, and by a number of its own weights."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"version": 2}


class Measuring(Counting):
    def get_extra_state(self) -> dict[str, Any]:
        return {**super().get_extra_state(), "norm": float(self.norm1.weight.detach().norm())}


class OfVersions(ByteGPT):
    kind: type[Block] = Versioned

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(self.kind() for _ in range(4))


class OfMeasures(OfVersions):
    kind = Measuring
