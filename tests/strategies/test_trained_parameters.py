"""Which parameters are trained, and what the step reads, as the step and hooks change it while training goes on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data import batches
from tests.models import trained
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst

NAMES = (
    "ddp_custom",
    "zero1_custom",
    "zero2_custom",
    "fsdp_custom",
    "hsdp_custom",
    "cp_custom",
    "tp_custom",
    "pp_custom",
    "pp_custom:schedule=turns",
    "pp_custom:loss=batch",
)
MODULES = (
    trained.FreezesInTheStep,
    trained.FreezesBehindForward,
    trained.FreezesBeforeBackward,
    trained.FreezesInsideOfLayers,
    trained.TakesTurns,
    trained.TakesTurnsByLists,
    trained.TakesTurnsByAssigning,
    trained.TakesTurnsInAHook,
)


def fitted(make: Any, strategy: str, ranks: int, microsteps: int = 1) -> Outcome:
    """Four batches."""
    readers = num_readers(strategy.partition(":")[0], ranks)
    return train_module(make, batches("byte_gpt", readers, 4), strategy, ranks, accumulate_grad_batches=microsteps)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("make", MODULES)
def test_what_a_step_freezes_or_thaws_is_trained_as_in_one_process(name: str, make: Any, ranks: Any) -> None:
    expected = once(fitted, make, "auto", 1)
    assert is_moving(expected)
    size = num_ranks(name.partition(":")[0])
    assert worst(ranks(size).run(fitted, make, checked(name), size)[0], expected) < TOLERANCE


@pytest.mark.parametrize("name", NAMES[:7])
@pytest.mark.parametrize("make", [trained.Manual, trained.ManualKeepsGradients, trained.ManualTurns])
def test_under_manual_optimization(name: str, make: Any, ranks: Any) -> None:
    expected = once(fitted, make, "auto", 1)
    assert is_moving(expected)
    size = num_ranks(name)
    assert worst(ranks(size).run(fitted, make, checked(name), size)[0], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", "zero2_custom", "fsdp_custom", "cp_custom", "pp_custom"])
@pytest.mark.parametrize("make", [*MODULES, trained.ReadsWhatHooksSet])
def test_what_changes_between_microsteps_is_followed(name: str, make: Any, ranks: Any) -> None:
    expected = once(fitted, make, "auto", 1, 2)
    assert is_moving(expected)
    assert worst(ranks(2).run(fitted, make, checked(name), 2, 2)[0], expected) < TOLERANCE
