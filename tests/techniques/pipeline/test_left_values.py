"""What layers leave elsewhere than in their results, under a pipeline: in attributes, lists, and objects of hooks."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest

from lightning_parallel.strategies import failures
from tests.data import batches
from tests.models import left_values
from tests.models.left_values import LEFT, Mixture
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst
from tests.rank_pool import RankError


def trained(kind: type[Mixture], strategy: str, num_ranks: int, readers: int = 1) -> Outcome:
    """Five steps."""
    return train_module(functools.partial(kind, "adamw"), batches("byte_gpt", readers), strategy, num_ranks)


def assert_parity(ranks: Any, kind: type[Mixture], strategy: str, size: int = 2, readers: int = 1) -> None:
    expected = once(trained, kind, "auto", 1)
    assert is_moving(expected)
    found = ranks(size).run(trained, kind, strategy, size, readers)
    assert worst(found[0], expected) < TOLERANCE
    assert found[-1].losses == pytest.approx(expected.losses, abs=TOLERANCE)


@pytest.mark.parametrize("name", LEFT)
def test_equals_one_process(ranks: Any, name: str) -> None:
    """The proof of the first step agrees, where all of the module's state is its own."""
    strategy = "pp_custom:microbatches=4"
    assert_parity(ranks, LEFT[name], strategy if name == "elsewhere" else checked(strategy))


@pytest.mark.parametrize("name", LEFT)
def test_stages_that_take_turns(ranks: Any, name: str) -> None:
    assert_parity(ranks, LEFT[name], checked("pp_custom:schedule=turns"))


@pytest.mark.parametrize(
    ("name", "strategy", "size", "readers"),
    [
        ("probabilities", "pp_custom:schedule=zbv", 2, 1),
        ("caught", "pp_custom:schedule=interleaved,virtual_stages=2,recompute=full", 2, 1),
        ("hooked", "pp_custom:stages=[3,1],loss=batch", 2, 1),
        ("hooked layers", "pp_custom:schedule=gpipe", 4, 1),
        ("probabilities", "fsdp_custom:pipeline=2,tensor=2", 4, 1),
    ],
)
def test_with_other_options(ranks: Any, name: str, strategy: str, size: int, readers: int) -> None:
    assert_parity(ranks, LEFT[name], strategy, size, readers)


def told(kind: type[Mixture], strategy: str, num_ranks: int) -> str:
    """What a fit says of its schedule."""
    with mock.patch("lightning_parallel.strategies.pipelined_module.rank_zero_info") as info:
        trained(kind, strategy, num_ranks)
    return "\n".join(call.args[0] for call in info.call_args_list)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Mixture, "takes layers.0.aux_loss, which has no dimension of samples"),
        (left_values.Returned, "takes what layers.3 returns, which has no dimension of samples"),
        (left_values.Counted, "layers.2, or a hook in it, changes calls"),
        (left_values.Numbers, "needs a value that a layer computes, before the last layer"),
    ],
)
def test_why_stages_take_turns(ranks: Any, kind: type[Mixture], words: str) -> None:
    said = ranks(2).run(told, kind, "pp_custom", 2)[0]
    assert words in said
    assert "take turns from here on" in said
    assert ("give loss='microbatch'" in said) == ("dimension" in words)


def refused(kind: type[Mixture], strategy: str) -> None:
    with mock.patch.object(failures, "GRACE", 1.0):
        trained(kind, strategy, 2)


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        (left_values.InLater, "pp_custom:loss=microbatch", "something that only another pipeline stage computes"),
        (Mixture, "pp_custom:loss=batch", "with loss='batch', where it has entries for each sample"),
    ],
)
def test_what_is_refused(ranks: Any, kind: type[Mixture], strategy: str, words: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(2).run(refused, kind, strategy)
    assert words in str(error.value)


def test_means_over_microbatches_where_they_are_asked_for(ranks: Any) -> None:
    """Each stage sends what its layers have left, with its gradients."""
    found, expected = (
        ranks(2).run(trained, Mixture, "pp_custom:loss=microbatch", 2)[0],
        once(trained, Mixture, "auto", 1),
    )
    assert worst(found, expected) > 0
    assert found.losses == pytest.approx(expected.losses, abs=0.2)
