"""Sketches: equal where tensors are, with and without shards, and different where they are not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_parallel.ranks.sketches import NUM, Sketches, unlike

HOST = torch.device("cpu")
SHAPES = [(), (1,), (7,), (5, 3), (1, 6), (4, 1, 3), (3, 5, 2, 2), (0, 3)]


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {str(shape): torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES}


def sketched(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return Sketches(HOST).of(found, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_the_mean_square_is_that_of_the_norm(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    for shape in ((40,), (8, 9), (4, 5, 3)):
        squares = []
        for _ in range(200):
            value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            (sketch,) = sketched({"x": value}).values()
            squares.append(float(sketch.square().mean() / value.abs().double().square().sum()))
        assert 0.5 < sum(squares) / len(squares) < 2


def test_equal_tensors_have_equal_sketches_and_one_element_is_seen() -> None:
    expected, names = sketched(tensors()), [str(shape) for shape in SHAPES if math.prod(shape)]
    assert unlike(sketched(tensors()), expected, 0.0, 0.0) == []
    for name in names:
        changed = tensors()
        changed[name].view(-1)[-1] += 1e-2 * max(1e-3, float(changed[name].norm()))
        assert unlike(sketched(changed), expected, 2e-4, 0.0) == [name]


def test_a_difference_of_the_tolerance_is_seen_whatever_its_form() -> None:
    generator = torch.Generator().manual_seed(5)
    value = torch.randn(24, 16, generator=generator)
    (expected,) = sketched({"x": value}).values()
    for index in range(200):
        if index % 2:  # one element, which a sketch sees with one product
            change = torch.zeros_like(value)
            change.view(-1)[int(torch.randint(value.numel(), (), generator=generator))] = 1.0
        else:
            change = torch.randn(24, 16, generator=generator)
        wrong = value + change * (2e-3 * value.norm() / change.norm())
        assert unlike(sketched({"x": wrong}), {"x": expected}, 2e-4, 0.0) == ["x"]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_what_is_no_number_is_unlike(number: float) -> None:
    changed = tensors()
    changed["(5, 3)"][2, 1] = number
    assert "(5, 3)" in unlike(sketched(changed), sketched(changed), 1.0, 1.0)
    assert unlike(sketched(changed), sketched(tensors()), 1.0, 0.0) == ["(5, 3)"]


def of_shards() -> dict[str, float]:
    """The largest differences from whole tensors, by how they are sharded over 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(3)
    whole = {str(shape): torch.randn(shape, generator=generator) for shape in ((7, 6), (5, 3, 4), (9, 1))}
    kinds: dict[str, list[Any]] = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "rows twice": [Shard(0), Shard(0)],
        "whole": [Replicate(), Replicate()],
    }
    found = {}
    for kind, placements in kinds.items():
        parts = {name: distribute_tensor(value, mesh, placements, src_data_rank=None) for name, value in whole.items()}
        ours, expected = Sketches(HOST).of(parts, parts), Sketches(HOST).of(whole, whole)
        found[kind] = max_apart(ours, expected)
        found[f"{kind}, whole where shards are"] = max_apart(Sketches(HOST).of(whole, parts), expected)
    matrix = whole["(7, 6)"]
    columns = distribute_tensor(matrix, mesh, [Replicate(), Shard(1)], src_data_rank=None).to_local()
    part = columns * (0.25, 0.75)[mesh.get_local_rank("a")]
    partial = {"x": DTensor.from_local(part, mesh, [Partial(), Shard(1)], run_check=False)}
    found["summands"] = max_apart(Sketches(HOST).of(partial, partial), Sketches(HOST).of({"x": matrix}, {"x": matrix}))
    rest = Sketches(HOST).of({}, parts)
    found["nothing"] = max_apart(rest, {name: torch.zeros(NUM) for name in parts})
    unexpected = Sketches(HOST).of(partial, {"x": matrix})
    found["other axes"] = 0.0 if bool(unexpected["x"].isnan().all()) else math.inf
    return found


def max_apart(ours: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(ours) == list(expected)
    return float(torch.stack([(ours[name] - expected[name]).abs().max() for name in expected]).max())


def test_shards_have_the_sketch_of_the_whole(ranks: Any) -> None:
    for found in ranks(4).run(of_shards):
        assert {kind: apart for kind, apart in found.items() if not apart < 1e-4} == {}
