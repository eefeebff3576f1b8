"""Hooks on parameters, which replicas call with the gradient of their own samples."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data import batches
from tests.models import hooked
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst
from tests.rank_pool import RankError


def fitted(make: Any, strategy: str, ranks: int, microsteps: int = 1) -> Outcome:
    """Four batches."""
    return train_module(make, batches("byte_gpt", ranks, 4), strategy, ranks, accumulate_grad_batches=microsteps)


@pytest.mark.parametrize("microsteps", [1, 2])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom"])
@pytest.mark.parametrize("make", [hooked.MasksRows, hooked.ScalesAtStart, hooked.ScalesByHand])
def test_what_commutes_with_the_mean_equals_one_process(name: str, make: Any, microsteps: int, ranks: Any) -> None:
    microsteps = 1 if make is hooked.ScalesByHand else microsteps
    expected = once(fitted, make, "auto", 1, microsteps)
    assert is_moving(expected)
    assert worst(ranks(2).run(fitted, make, checked(name), 2, microsteps)[0], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom"])
def test_a_hook_behind_the_sum(name: str, ranks: Any) -> None:
    expected = once(fitted, hooked.HalvesSums, "auto", 1, 2)
    assert worst(ranks(2).run(fitted, hooked.HalvesSums, checked(name), 2, 2)[0], expected) < TOLERANCE


def test_what_does_not_is_refused_and_told(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fitted, hooked.Clamps, checked("ddp_custom"), 2)
    assert "with a hook of its own, which is given the gradient of this rank's samples" in str(caught.value)
    assert "on_after_backward" in str(caught.value)


def test_a_hook_that_raises_when_it_is_called_once_more_ends_no_run(ranks: Any) -> None:
    """Nothing is compared then: the real call has raised nothing."""
    expected = once(fitted, hooked.HookFailsAgain, "auto", 1)
    assert worst(ranks(2).run(fitted, hooked.HookFailsAgain, checked("ddp_custom"), 2)[0], expected) < TOLERANCE
