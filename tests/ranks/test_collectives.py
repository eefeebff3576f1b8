"""Collectives with a backward: first and second derivatives are those of one process, and padding adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.ranks import collectives as ops
from tests.collectives import Collectives
from tests.parity import largest

LENGTH = 5


def reduced(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    return ops.reduce_from(weights[group.rank()] * ops.copy_to(x, group) ** 2, group)


def copied_together(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    one, other = ops.copy_all_to([x, x.float()], group)
    return ops.reduce_from(weights[group.rank()] * one * other, group)


def split(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    part = ops.scatter_to(x, 1, group, local=-(-LENGTH // group.size()))
    return weights.sum() * ops.gather_from(part**2, 1, group, length=LENGTH)


def split_sequence(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    local = -(-LENGTH // group.size())
    part = ops.scatter_to(x, 1, group, local=local)
    whole = ops.gather_from_sequence(part, 1, group, length=LENGTH)
    part = ops.reduce_scatter_to_sequence(weights[group.rank()] * whole**2, 1, group, local=local)
    return ops.gather_from(part, 1, group, length=LENGTH)


def exchanged(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    part = ops.scatter_to(x, 0, group)
    squares = ops.all_to_all(ops.all_to_all(part, 1, 0, group) ** 2, 0, 1, group)
    return weights.sum() * ops.gather_from(squares, 0, group)


def averaged(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    size = group.size()
    part = ops.scatter_to(x, 0, group, scale=1 / size)
    copied = ops.copy_to(x, group, scale=1 / size)
    own = copied.chunk(size)[group.rank()]
    return weights.sum() * ops.gather_from(part * own, 0, group, scale=size)


def stacked(x: Tensor, weights: Tensor, group: ProcessGroup) -> Tensor:
    own = weights[group.rank()] * ops.copy_to(x, group) ** 2
    return ops.share_gradient(ops.stacked(own, group).sum(0), group)


def errors(function: Callable[..., Tensor], columns: int, depth: int) -> list[float]:
    """The largest differences to one process, as parts of the largest number: of the result, and of derivatives."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    x = torch.randn(4, columns, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(group.size(), dtype=torch.float64)
    ours, expected = function(x, weights, group), weights.sum() * x**2
    found = [difference(ours, expected)]
    for _ in range(depth):
        ours, expected = (torch.autograd.grad((y**3).sum(), x, create_graph=True)[0] for y in (ours, expected))
        found.append(difference(ours, expected))
    return found


def difference(ours: Tensor, expected: Tensor) -> float:
    return float((ours - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("function", "columns"),
    [(reduced, LENGTH), (split, LENGTH), (split_sequence, LENGTH), (exchanged, 8), (averaged, LENGTH)],
)
def test_derivatives(ranks: Any, size: int, function: Any, columns: int) -> None:
    for found in ranks(size).run(errors, function, columns, 2):
        assert largest(found) < 1e-13


@pytest.mark.parametrize(("function", "tolerance"), [(copied_together, 1e-6), (stacked, 1e-13)])
def test_first_derivatives(ranks: Any, function: Any, tolerance: float) -> None:
    """One factor is in fp32, of 24 bits."""
    for found in ranks(2).run(errors, function, LENGTH, 1):
        assert largest(found) < tolerance


def kinds_of(function: Any, columns: int) -> dict[str, int]:
    with Collectives() as counted:
        errors(function, columns, 1)
    return {kind: sum(n for (k, _), n in counted.counts.items() if k == kind) for kind, _ in counted.counts}


@pytest.mark.parametrize(
    ("function", "columns", "expected"),
    [
        (reduced, LENGTH, {"all_reduce": 2}),
        (copied_together, LENGTH, {"all_reduce": 3}),  # one for each dtype
        (split, LENGTH, {"gather": 2}),
        (split_sequence, LENGTH, {"gather": 4, "reduce_scatter": 2}),
        (stacked, LENGTH, {"all_reduce": 1, "gather": 1, "reduce_scatter": 1}),
    ],
)
def test_one_collective_each_way(ranks: Any, function: Any, columns: int, expected: dict[str, int]) -> None:
    assert ranks(2).run(kinds_of, function, columns) == [expected] * 2
