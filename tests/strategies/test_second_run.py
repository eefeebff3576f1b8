"""A first step that differs runs once more, and the first module whose output differs is named."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jobs.first_steps import ends_before_an_update, fit, said
from tests.models.faults import (
    FailsInSecondRun,
    LogsCalls,
    LogsCallsOfAnotherLayer,
    OtherLayer,
    OtherOnEachRun,
    ReadsCalls,
    SumOfSamples,
)

SECOND = "In a second run, the output of "


def told(make: Any, strategy: str) -> tuple[str, list[str]]:
    with said() as lines:
        words = ends_before_an_update(make, strategy)
    return words, lines


@pytest.mark.parametrize(
    ("strategy", "before"),
    [
        ("ddp_custom", "model.blocks.1.layer"),
        ("fsdp_custom", "model.blocks.1.layer"),
        ("fsdp_custom:compile=layers", "model.blocks.1.layer"),
        ("tp_custom", "model.blocks.0"),
        ("pp_custom:loss=microbatch", "model.blocks.1.layer"),
        ("pp_custom:loss=microbatch,schedule=gpipe,stages=[1,2]", "model.blocks.1.layer"),
    ],
)
def test_a_layer_is_named(ranks: Any, strategy: str, before: str) -> None:
    words, lines = ranks(2).run(told, OtherLayer, strategy)[0]
    assert re.search(rf"{SECOND}'model.blocks.1' is the first to differ, by about [12]\.\de\+00 of its norm", words)
    assert f", after that of {before!r}, which is equal. Nothing was updated" in words
    assert "not compared" not in words
    (line,) = lines
    assert line.startswith("first step differs from one process: the loss is")
    assert line.endswith("It runs once more, to see where")


def test_outputs_that_are_parts_are_not_compared(ranks: Any) -> None:
    words, _ = ranks(2).run(told, OtherLayer, "cp_custom")[0]
    assert f"{SECOND}'model.blocks.2' is the first to differ" in words  # whole again, behind the stack
    assert "'model.positions', which is equal; 2 modules between these were not compared. Nothing" in words


@pytest.mark.parametrize(("make", "strategy"), [(SumOfSamples, "pp_custom:loss=microbatch")])
def test_nothing_is_claimed_where_all_outputs_are_equal(ranks: Any, make: Any, strategy: str) -> None:
    words, _ = ranks(2).run(told, make, strategy)[0]
    assert "the loss is" in words
    assert SECOND not in words


def test_nothing_is_claimed_of_another_loss(ranks: Any) -> None:
    words, _ = ranks(2).run(told, OtherOnEachRun, "fsdp_custom")[0]
    assert "the loss is" in words
    assert SECOND not in words


def test_an_error_of_the_second_run_does_not_hide_the_first(ranks: Any) -> None:
    """On one rank, whose words nobody needs: the others do not wait for it."""
    words, lines = ranks(2).run(told, FailsInSecondRun, "ddp_custom")[0]
    assert "the loss is" in words
    assert SECOND not in words
    assert lines[0].startswith("first step differs from one process")


STRATEGIES = ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logged_values_that_no_run_repeats_prove_nothing(ranks: Any, strategy: str) -> None:
    _, lines = ranks(2).run(fit, LogsCalls, "byte_gpt", strategy, 2, 1)[0]
    assert re.fullmatch(r"first step equals one process: loss .* gradients; calls: not the same in two runs", lines[-1])


def test_what_does_repeat_is_compared_all_the_same(ranks: Any) -> None:
    words, _ = ranks(2).run(told, LogsCallsOfAnotherLayer, "fsdp_custom")[0]
    assert "the loss is" in words
    assert "'calls'" not in words


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_no_run_repeats_ends_the_fit(ranks: Any, strategy: str) -> None:
    """Comparing has changed what it reads, so nothing may go on."""
    words, _ = ranks(2).run(told, ReadsCalls, strategy)[0]
    assert "In a second run, the loss of the plain copy is another one, too: the step reads and changes" in words
