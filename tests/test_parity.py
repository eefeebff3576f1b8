"""The comparison that the other tests rely on: what is not a number is never small enough."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

from tests.parity import TOLERANCE, Outcome, difference, largest, worst

TESTS = Path(__file__).parent


@pytest.mark.parametrize("numbers", [[1e-7, math.nan], [math.nan, 1e-7], [torch.tensor(math.nan), 0.0], [math.inf]])
def test_the_largest_is_not_small_where_one_is_not_a_number(numbers: list[float]) -> None:
    assert not largest(numbers) <= TOLERANCE


def test_the_largest_is_that_of_pythons() -> None:
    assert largest([1e-7, 3.0, 2]) == 3.0
    with pytest.raises(RuntimeError):
        largest([])


@pytest.mark.parametrize("part", ["losses", "initial", "final"])
def test_no_part_of_an_outcome_may_be_nan(part: str) -> None:
    def outcome() -> Outcome:
        weights = {"a": torch.zeros(2), "b": torch.zeros(1)}
        return Outcome([0.0, 0.0], [], dict(weights), {name: value.clone() for name, value in weights.items()})

    ours = outcome()
    assert worst(ours, outcome()) == 0
    getattr(ours, part)[1 if part == "losses" else "b"] = torch.tensor([math.nan]) if part != "losses" else math.nan
    assert not worst(ours, outcome()) <= TOLERANCE
    if part != "losses":
        assert not difference(getattr(ours, part), getattr(outcome(), part)) <= TOLERANCE


def test_no_test_compares_with_pythons_max() -> None:
    """`max` returns what it saw first, if it then meets a NaN; on exact numbers, such as bytes, it may be used."""
    found = []
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and "max(" in ast.unparse(node.left):
                text = ast.unparse(node)
                if any(word in text for word in ("TOLERANCE", "tolerance", "e-")) and text.startswith("max("):
                    found.append(f"{path.name}: {text}")
    assert found == []
