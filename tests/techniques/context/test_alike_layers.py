"""Layers of a kind: one is compared with itself in place of all where the step as a whole is compared."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from torch import Tensor, nn

from lightning_parallel.module.layer_check import LayerCheck
from tests.data import batches
from tests.jobs.first_steps import ends_before_an_update
from tests.models.cases import Block, ByteGPT
from tests.models.faults import WithDropout
from tests.parity import TOLERANCE, Outcome, once, train_module, worst


def compared_layers(make: Any, strategy: str, **kwargs: Any) -> tuple[int, Outcome]:
    """How many times a fit compares a layer with itself, and its outcome."""
    run_whole = LayerCheck.run_whole
    with mock.patch.object(LayerCheck, "run_whole", autospec=True, side_effect=run_whole) as runs:
        outcome = train_module(make, batches("byte_gpt", 1), strategy, 2, **kwargs)
    return runs.call_count, outcome


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize(("check", "number"), [("first_step", 1), ("off", 3)])
def test_one_layer_of_a_kind_is_enough_for_a_step_that_is_compared(
    ranks: Any, attention: str, check: str, number: int
) -> None:
    strategy = f"cp_custom:context_attention={attention},check={check}"
    count, outcome = ranks(2).run(compared_layers, ByteGPT, strategy)[0]
    assert count == number
    assert worst(outcome, once(train_module, ByteGPT, batches("byte_gpt", 1), "auto", 1)) < TOLERANCE


def test_all_are_compared_where_a_step_draws_numbers(ranks: Any) -> None:
    assert ranks(2).run(compared_layers, WithDropout, "cp_custom:check=first_step")[0][0] == 3


def test_all_are_compared_in_an_evaluation_before_training(ranks: Any) -> None:
    assert ranks(2).run(compared_with_sanity_check)[0] == 3


class Evaluated(ByteGPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch[0])

    def val_dataloader(self) -> Any:
        return batches("byte_gpt", 1)


def compared_with_sanity_check() -> int:
    return compared_layers(Evaluated, "cp_custom:check=first_step", num_sanity_val_steps=1)[0]


class ByIndex(Block):
    """A layer whose number, and nothing else, decides what it computes."""

    layer_idx = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - y.mean(1, keepdim=True) if self.layer_idx == 1 else y


class NumberedLayers(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(ByIndex() for _ in range(3))
        for index, block in enumerate(self.model.blocks):
            block.layer_idx = index  # type: ignore[assignment]


def test_a_layer_whose_number_decides_ends_the_fit(ranks: Any) -> None:
    found = ranks(2).run(ends_before_an_update, NumberedLayers, "cp_custom")[0]
    assert "the loss is" in found
    assert "model.blocks.1" in found
