"""Models with several stacks under a pipeline, against one process: encoders with decoders, pyramids, towers."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.data import batches
from tests.models.several_stacks import SEVERAL_STACKS, CalledTwice
from tests.parity import Outcome, assert_same_training, checked, is_moving, once, train_module

MODULES = {**SEVERAL_STACKS, "called_twice": CalledTwice}
FEW = 3


def trained(name: str, optimizer: str, strategy: str, num_ranks: int) -> Outcome:
    readers = max(1, num_ranks // 2) if "pipeline=2" in strategy else 1
    make = functools.partial(MODULES[name], optimizer)
    return train_module(make, batches("byte_gpt", readers, FEW), strategy, num_ranks, norms=True)


def assert_parity(ranks: Any, name: str, optimizer: str, strategy: str, size: int = 2) -> None:
    expected = once(trained, name, optimizer, "auto", 1)
    assert is_moving(expected)
    assert_same_training(ranks(size).run(trained, name, optimizer, checked(strategy), size)[0], expected)


@pytest.mark.parametrize("name", SEVERAL_STACKS)
@pytest.mark.parametrize(
    ("optimizer", "options"), [("sgd", "schedule=gpipe,microbatches=4"), ("adamw", "microbatches=8")]
)
def test_stacks_one_after_the_other(ranks: Any, name: str, optimizer: str, options: str) -> None:
    assert_parity(ranks, name, optimizer, f"pp_custom:{options}")


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("translator", [1, 4]),
        ("translator", [4, 1]),
        ("t5", [1, 3]),
        ("t5", [3, 1]),
        ("whisper", [3, 1]),
        ("cait", [3, 1]),
        ("skipping", [2, 4]),
        ("skipping", [5, 1]),
        ("towers", [1, 4]),
        ("towers", [4, 1]),
    ],
)
def test_a_cut_anywhere(ranks: Any, name: str, stages: list[int]) -> None:
    """What passes a stack by is sent along, whichever layer begins the stage that takes it."""
    assert_parity(ranks, name, "adamw", f"pp_custom:stages={stages},microbatches=4")
