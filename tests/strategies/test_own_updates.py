"""Modules that update, clear gradients or go backward in their own way: as in one process; the first step agrees."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from tests.data import batches
from tests.models import updates
from tests.names import num_readers
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst

NAMES = ("ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "cp_custom", "tp_custom", "pp_custom")
MODULES = (updates.UpdatesSeldom, updates.ClearsSeldom, updates.ClearsToZeros, updates.DoublesGradients)


def fitted(make: Any, strategy: str, ranks: int, microsteps: int = 1) -> Outcome:
    """Four batches."""
    readers = num_readers(strategy.partition(":")[0], ranks)
    return train_module(make, batches("byte_gpt", readers, 4), strategy, ranks, accumulate_grad_batches=microsteps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", MODULES)
def test_equal_to_one_process(name: str, make: Any, ranks: Any) -> None:
    expected = once(fitted, make, "auto", 1)
    assert is_moving(expected)
    assert worst(ranks(2).run(fitted, make, checked(name), 2)[0], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "pp_custom"])
@pytest.mark.parametrize("make", MODULES)
def test_windows_of_two_steps(name: str, make: Any, ranks: Any) -> None:
    expected = once(fitted, make, "auto", 1, 2)
    assert worst(ranks(2).run(fitted, make, checked(name), 2, 2)[0], expected) < TOLERANCE


def told(make: Any, strategy: str, ranks: int) -> list[str]:
    """What a fit says of its loss."""
    with mock.patch("lightning_parallel.strategies.loss_over_ranks.rank_zero_info") as info:
        fitted(make, checked(strategy), ranks)
    return [call.args[0] for call in info.call_args_list]


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom"])
def test_gradients_that_depend_on_the_samples_of_a_rank_are_told(name: str, ranks: Any) -> None:
    said = ranks(2).run(told, updates.DividesByFrequency, name, 2)[0]
    assert [text.partition(" divides gradients")[0] for text in said] == (
        [] if name == "tp_custom" else ["model.tokens"]
    )
