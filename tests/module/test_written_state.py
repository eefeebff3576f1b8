"""What a step has written into, and what others are told of it."""

from __future__ import annotations

import torch
from torch import nn

from lightning_parallel.module.written_state import News, WrittenState
from tests.models.containers import Collects


class Meter:
    def __init__(self) -> None:
        self.sum = 0.0


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.count, self.total, self.last = 0, torch.zeros(()), torch.zeros(3)
        self.outputs: list[torch.Tensor] = [torch.ones(1)]
        self.table = {"a": 1}
        self.anything = object()
        self._own, self.recent, self.cached = 0, [1.0, 2.0], None
        self.meter = Meter()


def test_what_is_written_is_named() -> None:
    holder = Holder()
    state = WrittenState({"": holder, "inner": Holder()})
    assert state.changed() == []
    holder.mean.add_(1)
    holder.count += 1
    holder.total = holder.total + 1
    holder.outputs.append(torch.zeros(1))
    holder._own += 1
    holder.table["a"] = 2
    holder.recent[:] = [2.0, 3.0]
    holder.meter.sum += 1.0
    holder.cached = torch.ones(3)
    holder.last = torch.ones(3)  # the next step may begin with it
    holder.new, holder.new_list, holder.new_number = torch.ones(3), [torch.ones(1)], 2.0
    changed = ["_own", "cached", "count", "last", "mean", "meter.sum", "outputs", "recent", "table", "total"]
    assert sorted(state.changed()) == changed
    assert list(state.new_values()) == ["new", "new_list", "new_number"]
    assert state.of_samples(3) == ["last", "inner.last"]  # without buffers, which are sent by themselves


def test_others_follow() -> None:
    holder, other = Holder(), Holder()
    state, follower = WrittenState({"": holder}), WrittenState({"": other})
    holder.count, holder.total = 5, torch.tensor(2.0)
    holder.mean.add_(1)
    holder.outputs.append(torch.full((1,), 7.0))
    holder.table["b"] = 2
    holder.recent[:] = [2.0, 3.0]
    holder.meter.sum = 4.0
    other.outputs.append(torch.zeros(1))  # of its own part of the step
    holder.new_list, holder.new_number = [torch.ones(1), 1.0], 2.0
    other.new_list = ["its own"]
    follower.follow(state.news(), torch.device("cpu"))
    assert (other.new_list, other.new_number) == ([torch.ones(1), 1.0], 2.0)
    assert (other.count, other.total, other.table) == (5, torch.tensor(2.0), {"a": 1, "b": 2})
    assert [float(value) for value in other.outputs] == [1.0, 7.0]
    assert (other.recent, other.meter.sum) == ([2.0, 3.0], 4.0)
    assert other.mean.sum() == 0  # buffers are sent by themselves


def test_objects_that_appear_in_a_step() -> None:
    """They come as a whole, and whoever holds one that was there goes on with it."""
    holder, other = Collects(), Collects()
    holder.tracker.meters["a"].update(1.0)
    other.tracker.meters["a"].update(1.0)
    state, follower = WrittenState({"": holder}), WrittenState({"": other})
    kept = other.tracker.meters["a"]
    holder.tracker.meters["a"].update(2.0)
    holder.tracker.meters["b"].update(3.0)
    holder.steps["train"].add(4)
    holder.counted["train"] += 5
    holder.recent.append(6.0)
    for _ in range(2):
        follower.follow(state.news(), torch.device("cpu"))
        assert other.tracker.meters["a"] is kept
        assert other.collected() == holder.collected()


def test_what_cannot_be_sent_is_left_out() -> None:
    holder = Holder()
    state = WrittenState({"": holder})
    holder.outputs.append(object())  # type: ignore[arg-type]
    holder.count += 1
    assert state.news() == {"count": News(1)}
