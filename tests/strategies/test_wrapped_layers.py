"""Layers around which people put functions of their own, or the compiler: equal to one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.data import batches
from tests.models.wrapped_layers import BesideAnObject, CompiledLayers, CompilesItself, InRecords, OwnForwards
from tests.parity import TOLERANCE, Outcome, checked, is_moving, once, train_module, worst
from tests.rank_pool import RankError


def trained(make: Any, strategy: str, num_ranks: int, readers: int) -> Outcome:
    name = strategy if strategy == "auto" else checked(strategy)
    return train_module(functools.partial(make, "sgd"), batches("byte_gpt", readers, 3), name, num_ranks)


@pytest.mark.parametrize("make", [OwnForwards, CompiledLayers, CompilesItself])
@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [
        ("ddp_custom", 2, 2),
        ("fsdp_custom", 2, 2),
        ("cp_custom", 2, 1),
        ("pp_custom", 2, 1),
        ("pp_custom:schedule=turns", 2, 1),
        ("fsdp_custom:pipeline=2,shard=2", 4, 2),
    ],
)
def test_wrapped_layers_are_those_of_one_process(ranks: Any, make: Any, strategy: str, size: int, readers: int) -> None:
    """Also the copy with which the first step is compared computes with its own layers."""
    alone = once(trained, make, "auto", 1, 1)
    assert is_moving(alone)
    assert worst(ranks(size).run(trained, make, strategy, size, readers)[0], alone) < TOLERANCE


def test_objects_in_place_of_hidden_states_have_no_sequence_to_cut(ranks: Any) -> None:
    words = r"OfRecords\) is given Record as its first argument, where context parallel cuts .*context=1"
    with pytest.raises(RankError, match=words):
        ranks(2).run(trained, InRecords, "cp_custom", 2, 1, deadline=30)


@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [
        ("fsdp_custom", 2, 2),
        ("pp_custom", 2, 1),
        ("pp_custom:schedule=turns", 2, 1),
        ("fsdp_custom:pipeline=2,shard=2", 4, 2),
    ],
)
def test_objects_in_place_of_hidden_states(ranks: Any, strategy: str, size: int, readers: int) -> None:
    """No schedule can send them, so that stages take turns."""
    found = ranks(size).run(trained, InRecords, strategy, size, readers)[0]
    assert worst(found, once(trained, InRecords, "auto", 1, 1)) < TOLERANCE


def test_an_object_beside_hidden_states_reaches_all_stages(ranks: Any) -> None:
    found = ranks(2).run(trained, BesideAnObject, "pp_custom:schedule=turns", 2, 1)[0]
    assert worst(found, once(trained, BesideAnObject, "auto", 1, 1)) < TOLERANCE
