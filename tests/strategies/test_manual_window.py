"""Under manual optimization, the first step is compared with one process up to its first update."""

from __future__ import annotations

import functools
import re
from typing import Any
from unittest import mock

import pytest

from tests.data import batches
from tests.jobs.first_steps import ends_before_an_update, fit
from tests.models.cases import GAN, BareParameter
from tests.models.faults import ManualLogsCalls, ManualStep, RaisingCopy, SharpnessAware
from tests.models.user_code import Dropping
from tests.parity import TOLERANCE, once, train_module, worst

EQUAL = r"first step equals one process up to its first update: (?:loss ([\d.]+) = ([\d.]+), )?(\d+) gradients"


def compared(ranks: Any, make: Any, case: str, strategy: str) -> list[str]:
    """Said of the first step, of a fit that ends with the weights of one process."""
    readers = 1 if strategy.startswith(("tp", "cp")) else 2
    outcome, lines = ranks(2).run(fit, make, case, strategy, 2, readers)[0]
    assert worst(outcome, once(train_module, make, batches(case, 1), "auto", 1)) < TOLERANCE
    return lines  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["ddp_custom", "zero2_custom", "fsdp_custom"])
def test_two_optimizers(ranks: Any, strategy: str) -> None:
    (line,) = compared(ranks, GAN, "gan", strategy)
    equal = re.fullmatch(EQUAL, line)
    assert equal is not None, line
    assert equal[1] == equal[2]
    assert int(equal[3]) == 4  # of the discriminator, which is updated first, with the others frozen


@pytest.mark.parametrize("kind", ["wrapped", "closure"])
@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "tp_custom", "cp_custom"])
def test_clipping_closures_and_schedulers(ranks: Any, strategy: str, kind: str) -> None:
    """The scheduler steps once a batch: not once more for the copy."""
    (line,) = compared(ranks, CLOSURE if kind == "closure" else ManualStep, "byte_gpt", strategy)
    equal = re.fullmatch(EQUAL, line)
    assert equal is not None, line
    assert equal[1] == equal[2]
    assert int(equal[3]) > 30


CLOSURE = functools.partial(ManualStep, kind="closure")


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "fsdp_custom:accumulation_sync=last"])
def test_gradients_of_several_steps(ranks: Any, strategy: str) -> None:
    """The first ones are dropped, and those of the two batches behind update."""
    (line,) = compared(ranks, Dropping, "byte_gpt", strategy)
    equal = re.fullmatch(EQUAL, line)
    assert equal is not None, line
    assert int(equal[3]) > 30


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_logged_values_that_no_run_repeats_prove_nothing(ranks: Any, strategy: str) -> None:
    """The second run of the copy leaves its gradients as they are: they are compared afterwards."""
    _, lines = ranks(2).run(fit, ManualLogsCalls, "byte_gpt", strategy, 2, 2)[0]
    assert lines[-1].startswith("first step equals one process up to its first update: loss")
    assert lines[-1].endswith("; calls: not the same in two runs")


@pytest.mark.parametrize("strategy", ["ddp_custom", "zero1_custom", "fsdp_custom"])
def test_steps_that_look_at_gradients_see_averages(ranks: Any, strategy: str) -> None:
    (line,) = compared(ranks, SharpnessAware, "byte_gpt", strategy)
    assert re.fullmatch(EQUAL, line), line


def test_a_copy_that_fails_on_one_rank_leaves_nobody_waiting(ranks: Any) -> None:
    (line,) = compared(ranks, RaisingCopy, "byte_gpt", "fsdp_custom")
    assert line.startswith("first step not compared with one process: ")


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom"])
def test_another_loss_ends_the_fit(ranks: Any, strategy: str) -> None:
    words = ranks(2).run(ends_before_an_update, functools.partial(ManualStep, is_other=True), strategy)[0]
    assert "the loss of backward 1 is" in words
    assert "'train_loss' is logged as" in words
    assert "gradients differ" in words


class ManualBare(BareParameter):
    """A parameter of the LightningModule itself, whose gradient is reduced apart."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


def without_reducing(strategy: str) -> str:
    with mock.patch("lightning_parallel.steps.reduce_gradients", return_value=None):
        return ends_before_an_update(ManualBare, strategy)


def test_gradients_that_nobody_reduces_end_the_fit(ranks: Any) -> None:
    words = ranks(2).run(without_reducing, "fsdp_custom:layers=model.blocks")[0]
    assert "gradients differ" in words
    assert "the loss" not in words


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raw", "the step updates through optimizers that Lightning has not wrapped"),
        ("backward", "the step calls backward by itself, and not manual_backward"),
    ],
)
def test_reasons_for_not_comparing_are_told(ranks: Any, kind: str, reason: str) -> None:
    _, lines = ranks(2).run(fit, functools.partial(ManualStep, kind=kind), "byte_gpt", "fsdp_custom", 2, 2)[0]
    assert lines == [f"first step not compared with one process: {reason}"]
