"""Buffers of rank 0 on all ranks, before each step; large ones that nobody writes are left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import _torch
from lightning_parallel.techniques.buffer_sync import BufferSync


class Buffers(nn.Module):
    """A mask of a million entries, statistics, and tables that are written late or unseen."""

    def __init__(self, side: int = 1024) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(side, side, dtype=torch.bool))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("late", torch.zeros(300_000))
        self.register_buffer("codes", torch.zeros(300_000))
        self.register_buffer("replaced", torch.zeros(300_000))


def step(module: Any, index: int) -> None:
    """Writes of a step, other ones on each rank."""
    rank = dist.get_rank()
    module.mean += rank + 1
    module.codes.data += rank + 1
    if index == 12 and rank == 1:  # by one rank alone, and not by that whose values all get
        module.late.fill_(7.0)
    if index == 13:
        module.replaced = torch.full_like(module.replaced, float(rank))


def synchronized(steps: int, make: Callable[[], nn.Module] = Buffers) -> tuple[list[float], list[int], list[str]]:
    """The largest difference to DDP's way after each call, the bytes that it broadcast, and what it told."""
    module, theirs = make(), make()
    told: list[str] = []
    buffers = BufferSync(module, None, dist.group.WORLD, tell=told.append)
    differences, sent = [], []
    plain = _torch.groups.broadcast_tensors
    for index in range(steps):
        with mock.patch.object(_torch.groups, "broadcast_tensors", side_effect=plain) as broadcast:
            buffers.synchronize()
        sent.append(sum(t.numel() * t.itemsize for call in broadcast.call_args_list for t in call.args[0]))
        plain(list(theirs.buffers()), source=0)
        pairs = zip(module.buffers(), theirs.buffers(), strict=True)
        differences.append(max(float((a.double() - b.double()).abs().max()) for a, b in pairs))
        step(module, index)
        step(theirs, index)
    return differences, sent, told


def test_buffers_are_as_under_ddp_and_the_mask_stays_where_it_is(ranks: Any) -> None:
    whole = sum(b.numel() * b.itemsize for b in Buffers().buffers())
    table = 300_000 * 4
    for differences, sent, told in ranks(2).run(synchronized, 20):
        assert max(differences) == 0
        assert not told
        looks = {1, 2, 3, 4, 8, 16}
        assert [sent[call - 1] for call in sorted(looks)] == [whole] * len(looks)
        assert sent[4] == sent[6] == 32 + table  # the statistics, and what is written through .data
        assert sent[13 + 1] == 32 + 3 * table  # the two that were written later, from the next call on
        assert sent[13] == 32 + 2 * table


class Small(Buffers):
    """Less than what it costs to agree."""

    def __init__(self) -> None:
        super().__init__(8)
        for name in ("late", "codes", "replaced"):
            self._buffers[name] = torch.zeros(4)


def reductions() -> int:
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        differences, _, _ = synchronized(20, Small)
    assert max(differences) == 0
    return int(reduce.call_count)


def test_small_buffers_are_sent_without_asking(ranks: Any) -> None:
    assert ranks(2).run(reductions) == [0, 0]


class Layouts(Buffers):
    """Elements that share memory, a sparse matrix and numbers of eight bits beside the large ones."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(300_000.0).expand(2, -1))
        self.register_buffer("edges", torch.eye(8).to_sparse())
        self.register_buffer("scales", torch.arange(8.0).to(torch.float8_e4m3fn))


def late_writes() -> tuple[list[str], list[list[float]]]:
    """What is told, and for each step what the first rank has written into each of the three."""
    module: Any = Layouts()
    told: list[str] = []
    buffers = BufferSync(module, None, dist.group.WORLD, tell=told.append)
    seen = []
    for index in range(9):
        buffers.synchronize()
        seen.append([float(each.sum()) for each in (module.table[0, :1], module.edges, module.scales.float())])
        if index == 4:
            added = float(dist.get_rank() + 1)
            module.table[:, 0].view(-1)[:1].fill_(added)
            module.edges.values()[0] += added
            module.scales[0] = added
    return told, seen


def test_tensors_of_any_layout_are_sent_when_they_are_written(ranks: Any) -> None:
    for told, seen in ranks(2).run(late_writes):
        assert not told
        assert seen[:5] == [[0.0, 8.0, 28.0]] * 5
        assert seen[5:] == [[1.0, 9.0, 29.0]] * 4


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(300_000))


def unseen() -> tuple[list[str], list[float]]:
    """What is told, and the values, after writes through ``.data`` that begin after the first steps."""
    module, told = Late(), []
    buffers = BufferSync(module, None, dist.group.WORLD, tell=told.append)
    values = []
    for index in range(18):
        buffers.synchronize()
        table: Tensor = module.table
        values.append(float(table[0]))
        if index >= 9:
            table.data.fill_(float(dist.get_rank() + index))
    return told, values


def test_what_begins_late_and_unseen_is_told_and_equal_from_then_on(ranks: Any) -> None:
    (told, first), (_, second) = ranks(2).run(unseen)
    assert len(told) == 1
    assert "the buffers table are written through .data" in told[0]
    assert first[15:] == second[15:] == [14.0, 15.0, 16.0]


@pytest.mark.parametrize("values", [[0.0, float("nan")], [1.0, 2.0]])
def test_without_ranks_nothing_happens(values: list[float]) -> None:
    module = nn.Module()
    module.register_buffer("table", torch.tensor(values))
    BufferSync(module, None, None, tell=print).synchronize()  # type: ignore[arg-type]
