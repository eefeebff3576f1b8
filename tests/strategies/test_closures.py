"""Optimizers that decide by the loss of a closure decide alike on all ranks, by the loss of all samples."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import difference, once, train_module

CLOSE = 1e-12
"""A search along a line turns on the last bits of losses: in float32, weights that are 1 + 1e-7 times as large at the
start differ by 6e-2 after three steps, also in one process. So these modules are in float64."""


class ByLBFGS(ByteGPT):
    """Two evaluations and more in each step."""

    def __init__(self, search: str | None = "strong_wolfe") -> None:
        super().__init__("sgd")
        self.search = search
        self.double()

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.5, max_iter=4, line_search_fn=self.search)


class Manually(ByLBFGS):
    """The same, with a closure of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        losses = []

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.loss(batch[0])
            self.manual_backward(loss)
            losses.append(loss.detach())
            return loss

        optimizer.step(closure)
        return {"loss": losses[0]}


def trained(kind: str, strategy: str, size: int) -> Any:
    """Three steps: the outcome, and the weights of this rank."""
    make: Any = {"strong_wolfe": ByLBFGS, "none": functools.partial(ByLBFGS, None), "manual": Manually}[kind]
    modules: list[torch.nn.Module] = []

    def build() -> Any:
        modules.append(make())
        return modules[0]

    outcome = train_module(build, loader(size, steps=3), strategy, size, gradient_clip_val=None)
    return outcome, dict(modules[0].state_dict())


@pytest.mark.parametrize("kind", ["strong_wolfe", "none", "manual"])
def test_lbfgs(kind: str, ranks: Any) -> None:
    expected, _ = once(trained, kind, "auto", 1)
    found = ranks(2).run(trained, kind, "ddp_custom", 2)
    assert difference(found[0][1], found[1][1]) == 0  # ranks do not drift
    assert difference(found[0][0].final, expected.final) < CLOSE
    assert found[0][0].losses == pytest.approx(expected.losses, abs=CLOSE)
