"""Buffers that hooks register when stages are there already, and tensors that layers keep in attributes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.data import batches
from tests.models.cases import Block
from tests.models.pipelined import Deep
from tests.parity import TOLERANCE, difference, once, trainer_for

NAMES = [("pp_custom", 2), ("pp_custom:schedule=turns", 2), ("fsdp_custom:shard=1,pipeline=4", 4)]


class Peaks(Block):
    """Keeps the largest activation that it has had."""

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        with torch.no_grad():
            self.peak = torch.maximum(self.peak, result.detach().abs().max())
        return result


class Decays(Block):
    """Writes into a tensor of its own; what it writes does not grow with the number of calls."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.peak.fill_(self.mlp[0].out_features)
        return super().forward(x)


class Promotes(Block):
    """Makes a buffer of its tensor in the step."""

    persistent = True

    def forward(self, x: Tensor) -> Tensor:
        if "peak" in vars(self):
            peak = self.peak
            del self.peak
            self.register_buffer("peak", peak.clone(), persistent=self.persistent)
        with torch.no_grad():
            self.peak.fill_(self.mlp[0].out_features)
        return super().forward(x)


class PromotesUnsaved(Promotes):
    """Makes one that is not saved."""

    persistent = False


class MakesUnsaved(Block):
    """Makes a buffer in the first step, which is not saved, and which no later step writes."""

    def forward(self, x: Tensor) -> Tensor:
        if "peak" in vars(self):
            del self.peak
            self.register_buffer("peak", torch.ones(()), persistent=False)
        return super().forward(x)


class Registers(Deep):
    """Gives its layers a tensor in a hook, and itself a buffer that the step writes into."""

    def __init__(self, layer: type[nn.Module], hook: str, *, is_buffer: bool) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(layer() for _ in range(4))
        self.hook, self.is_buffer = hook, is_buffer

    def put(self, hook: str) -> None:
        if hook == self.hook:
            self.register_buffer("largest", torch.zeros(()))
            for block in self.model.blocks:
                if self.is_buffer:
                    block.register_buffer("peak", torch.zeros(()))
                else:
                    block.peak = torch.zeros(())

    def on_fit_start(self) -> None:
        self.put("on_fit_start")

    def on_train_start(self) -> None:
        self.put("on_train_start")

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.largest.fill_(self.trainer.global_step)
        return loss


def kept(make: Any, strategy: str, num_ranks: int) -> dict[str, Tensor]:
    """What layers and the module keep, on this rank."""
    torch.manual_seed(3)
    module = make()
    trainer_for(strategy, num_ranks).fit(module, batches("byte_gpt", 1))
    peaks = {str(number): block.peak for number, block in enumerate(module.model.blocks)}
    return {
        **peaks,
        **{name: value for name, value in module.state_dict().items() if "peak" in name or "largest" in name},
    }


@pytest.mark.parametrize(("name", "size"), NAMES)
@pytest.mark.parametrize(
    ("layer", "hook", "is_buffer"),
    [
        (Peaks, "on_fit_start", True),
        (Peaks, "on_train_start", True),
        (Decays, "on_fit_start", False),
        (Promotes, "on_fit_start", False),
        (PromotesUnsaved, "on_fit_start", False),
        (MakesUnsaved, "on_fit_start", False),
    ],
)
def test_what_hooks_add_is_that_of_one_process(
    ranks: Any, name: str, size: int, layer: type[nn.Module], hook: str, is_buffer: bool
) -> None:
    make = functools.partial(Registers, layer, hook, is_buffer=is_buffer)
    expected = once(kept, make, "auto", 1)
    assert all(value > 0 for value in expected.values())
    for found in ranks(size).run(kept, make, name, size):
        assert found.keys() == expected.keys()
        assert difference(found, expected) < TOLERANCE
