"""Dataclasses taken apart and put together, as another rank does it."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel import ConfigurationError
from lightning_parallel.techniques.pipeline import records
from lightning_parallel.techniques.pipeline.records import put_together, taken_apart


@dataclass(frozen=True)
class Inner:
    weight: Tensor
    name: str = "inner"


@dataclass(slots=True)
class Outer:
    inner: Inner
    parts: list[Any]
    missing: Tensor | None = None


@dataclass
class Layer(nn.Module):
    """A module, and no record."""

    width: int

    def __post_init__(self) -> None:
        super().__init__()


def over(values: Any) -> Any:
    """Through flat lists, with another tensor in place of each, and structure that is pickled."""
    leaves, spec = tree_flatten(taken_apart(values))
    assert not any(isinstance(leaf, Outer | Inner) for leaf in leaves)
    doubled = [2 * leaf if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return put_together(tree_unflatten(doubled, pickle.loads(pickle.dumps(spec))))


def test_records_in_containers_and_in_records() -> None:
    values = (OrderedDict(a=Outer(Inner(torch.ones(2)), [Inner(torch.ones(1), "b"), 3])), 4.0)
    found, number = over(values)
    assert number == 4.0
    outer = found["a"]
    assert isinstance(outer, Outer)
    assert outer.inner.weight.tolist() == [2, 2]
    assert (outer.inner.name, outer.parts[0].name, outer.parts[1], outer.missing) == ("inner", "b", 3, None)
    assert outer.parts[0].weight.tolist() == [2]


def test_attributes_beside_fields_are_kept() -> None:
    record = Local(torch.ones(1))
    record.later = torch.ones(1)  # type: ignore[attr-defined]
    assert over(record).later.tolist() == [2]


@dataclass
class Local:
    x: Tensor


def test_what_is_no_record_stays_the_same_object() -> None:
    values = [Layer(3), Outer, torch.ones(1), {"a": 1}]
    assert taken_apart(values) is values
    assert put_together(values) is values


def test_a_class_that_another_rank_does_not_find(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Hidden:
        x: Tensor

    apart = taken_apart(Hidden(torch.ones(1)))
    assert isinstance(put_together(apart), Hidden)
    monkeypatch.setattr(records, "_classes", {})
    with pytest.raises(
        ConfigurationError, match=r"returns .*Hidden, a class that this rank does not find in .*top level"
    ):
        put_together(apart)
