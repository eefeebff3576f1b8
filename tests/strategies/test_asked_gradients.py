"""Gradients that a step asks for by itself: those of this rank's samples, which nobody averages."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.data import batches
from tests.jobs.first_steps import said
from tests.models import asked_gradients, habits
from tests.models.user_code import Tokens
from tests.names import num_readers
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst
from tests.rank_pool import RankError


def fitted(make: Any, strategy: str, ranks: int) -> tuple[Outcome, list[str]]:
    """Three batches, and what was said of losses."""
    with said("the loss of a batch") as lines:
        readers = 1 if strategy == "auto" else num_readers(strategy.partition(":")[0], ranks)
        outcome = train_module(make, batches("byte_gpt", readers, 3), strategy, ranks)
    return outcome, lines


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "fsdp_custom"])
def test_a_weight_of_gradients_is_told_of(name: str, ranks: Any) -> None:
    """It looks at all samples of a rank, as under DDP; the step cannot be tried without a graph."""
    _, lines = ranks(2).run(fitted, asked_gradients.Weighted, checked(name), 2)[0]
    assert len(lines) == 1


NEWEST = pytest.mark.skipif(
    torch.__version__ >= "2.15", reason="torch 2.15 ends a second torch.autograd.grad through a DTensor in an error"
)


@pytest.mark.parametrize("make", [asked_gradients.Weighted, pytest.param(asked_gradients.WeightedInside, marks=NEWEST)])
def test_ranks_that_share_samples_have_those_of_one_process(make: Any, ranks: Any) -> None:
    expected, _ = once(fitted, make, "auto", 1)
    found, lines = ranks(2).run(fitted, make, checked("tp_custom"), 2)[0]
    assert is_moving(expected)
    assert worst(found, expected) < TOLERANCE
    assert lines == []


@pytest.mark.parametrize("name", ["fsdp_custom", "cp_custom", "hsdp_custom"])
def test_the_error_for_the_gradient_of_a_shard_says_what_to_do(name: str, ranks: Any) -> None:
    size = 4 if name == "hsdp_custom" else 2
    with pytest.raises(RankError, match=r"Call backward and read \.grad, or use zero1_custom"):
        ranks(size).run(fitted, asked_gradients.WeightedInside, checked(name), size)


def test_the_error_for_what_another_stage_computes_says_what_to_do(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"no path to what another stage computes.*give schedule='turns'"):
        ranks(2).run(fitted, asked_gradients.OfEmbeddings, "pp_custom", 2)
    expected, _ = once(fitted, asked_gradients.OfEmbeddings, "auto", 1)
    found, _ = ranks(2).run(fitted, asked_gradients.OfEmbeddings, "pp_custom:schedule=turns", 2)[0]
    assert is_moving(expected)
    assert worst(found, expected) < TOLERANCE


def test_and_can_be_had_without_units(ranks: Any) -> None:
    _, lines = ranks(2).run(fitted, asked_gradients.WeightedInside, checked("fsdp_custom:layers=[]"), 2)[0]
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddp_custom", "after step 1, .* differs between rank 0 and rank 1"),
        ("zero1_custom", r"before update 1, the gradient of .* differs between rank 0 and rank 1.*manual_backward"),
        ("zero2_custom", r"gradients that nobody has reduced over ranks.*manual_backward"),
        ("fsdp_custom:layers=[]", r"gradients that nobody has reduced over ranks.*manual_backward"),
    ],
)
def test_training_by_what_nobody_has_averaged_is_refused(name: str, words: str, ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(fitted, asked_gradients.Assigned, checked(name), 2)
    assert re.search(words, str(caught.value), re.DOTALL)


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom"])
def test_what_is_averaged_trains_as_in_one_process(name: str, ranks: Any) -> None:
    expected, _ = once(fitted, asked_gradients.Averaged, "auto", 1)
    assert is_moving(expected)
    assert worst(ranks(2).run(fitted, asked_gradients.Averaged, checked(name), 2)[0][0], expected) < TOLERANCE


class UnitwiseClipping(Tokens):
    """Clips each row by its own norm (Brock et al. 2021), in place and without a gradient of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            weight, gradient = parameter.detach(), parameter.grad.detach()  # type: ignore[union-attr]
            dims = tuple(range(1, weight.ndim)) or None
            most = weight.norm(dim=dims, keepdim=True).clamp_(min=1e-3).mul_(0.01)
            norm = gradient.norm(dim=dims, keepdim=True).clamp_(min=1e-6)
            gradient.copy_(gradient.where(norm < most, gradient * (most / norm)))


@pytest.mark.parametrize("name", ["tp_custom", "fsdp_tp_custom", "fsdp_custom", "hsdp_custom"])
@pytest.mark.parametrize("make", [UnitwiseClipping, habits.GradientNormByHand])
def test_norms_of_rows_are_those_of_whole_rows(make: Any, name: str, ranks: Any) -> None:
    size = 2 if name in ("tp_custom", "fsdp_custom") else 4
    expected, _ = once(fitted, make, "auto", 1)
    assert worst(ranks(size).run(fitted, make, checked(name), size)[0][0], expected) < TOLERANCE


@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom"])
def test_gradients_of_another_optimizer_may_wait(name: str, ranks: Any) -> None:
    expected, _ = once(fitted, asked_gradients.TwoUntoggled, "auto", 1)
    assert is_moving(expected)
    found = ranks(2).run(fitted, asked_gradients.TwoUntoggled, checked(name), 2)[0][0]
    assert worst(found, expected) < TOLERANCE
