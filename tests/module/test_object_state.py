"""Blocks of snapshots: what objects hold, put back into the same objects."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.module.object_state import Contents, Numbers, ObjectState, tensors_inside


@pytest.mark.parametrize(
    "container", [{"a": 1, "b": 2}, OrderedDict(a=1, b=2), Counter(a=1, b=2), [1, 2], deque([1, 2], 2), {1, 2}]
)
def test_all_that_a_container_held(container: Any) -> None:
    before, contents = container.copy(), Contents(container)
    for _ in range(2):
        container.clear()
        change = {"c": 3} if "a" in before else {3}
        container.append(3) if isinstance(container, list | deque) else container.update(change)
        contents.restore()
        assert container == before
        assert list(container) == list(before)


def test_entries_come_back_in_their_order() -> None:
    entries = {"a": 1, "b": 2}
    contents = Contents(entries)
    del entries["a"]
    entries["a"] = 3
    contents.restore()
    assert list(entries.items()) == [("a", 1), ("b", 2)]


def test_entries_that_do_not_count_are_left_alone() -> None:
    entries = {"a": 1, "_b": 2}
    contents = Contents(entries, lambda name, _: not name.startswith("_"))
    entries.update(a=3, _b=4, c=5, _d=6)
    contents.restore(keeps_new=True)
    assert entries == {"a": 1, "_b": 4, "c": 5, "_d": 6}
    contents.restore()
    assert entries == {"a": 1, "_b": 4, "_d": 6}


def test_only_changes_of_a_time_are_undone() -> None:
    """What a technique changed, and not what was changed since, or taken away meanwhile."""
    entries = {"changed": 1, "same": 2, "gone": 3}
    contents = Contents(entries)
    entries.update(changed=4, new=5)
    del entries["gone"]
    contents.keep_changes()
    assert contents.before == {"changed": 1}
    entries.update(same=6, later=7)
    contents.restore()
    assert entries == {"changed": 1, "same": 6, "later": 7}


def test_attributes_and_the_containers_among_them() -> None:
    seen = [1]
    holder = SimpleNamespace(seen=seen, name="a", kept=OrderedDict(a=1))
    state = ObjectState(holder)
    seen.append(2)
    holder.kept["b"] = 2
    holder.seen, holder.name, holder.new = [], "b", 3
    state.restore()
    assert vars(holder) == {"seen": [1], "name": "a", "kept": {"a": 1, "b": 2}}
    assert holder.seen is seen


def test_containers_in_containers() -> None:
    holder = SimpleNamespace(logs={"a": [1], "b": ({2},)}, named=defaultdict(list), data=[[0]] * 5000)
    state = ObjectState(holder)
    holder.logs["a"].append(2)
    holder.logs["b"][0].add(3)
    holder.named["c"].append(4)
    holder.data[0].append(5)
    state.restore()
    assert (holder.logs, holder.named) == ({"a": [1], "b": ({2},)}, {})
    assert holder.data[0] == [0, 5]  # so many entries are data


def test_tensors_that_are_state() -> None:
    small, large, weight = torch.zeros(2), torch.zeros(1 << 17), nn.Parameter(torch.zeros(2))
    assert list(tensors_inside([large, {"a": [small, weight, large]}, 3])) == [large, small]


def test_numbers_are_written_back() -> None:
    tensor = torch.zeros(2, requires_grad=True)
    numbers = Numbers([tensor], "cpu")
    for _ in range(2):
        tensor.data += 1
        numbers.restore()
        assert tensor.tolist() == [0, 0]


def test_numbers_that_are_there_are_not_written_again() -> None:
    """A graph that was made with such a tensor could not be gone back through."""
    norm, base = torch.nn.BatchNorm1d(2), torch.eye(2)
    numbers = Numbers([base, *norm.buffers()])
    weight = torch.ones(2, 2, requires_grad=True)
    product = base @ weight
    norm(product.detach() + torch.randn(2, 2))  # writes without counting
    numbers.restore()
    assert norm.running_mean is not None
    assert not norm.running_mean.any()
    product.sum().backward()
