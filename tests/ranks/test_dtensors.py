"""Whole values of shards: those of torch's own redistribution, for sizes that ranks cannot share evenly, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_parallel.ranks.dtensors import whole_on_device

SHAPES = [(8, 6), (7, 5), (1, 3), (2, 9), (5,)]


def differing(placements: Any, sizes: tuple[int, ...]) -> list[Any]:
    """The shapes of which the whole is another one than it was, on this rank."""
    names = ("one", "other")[: len(sizes)]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    found = []
    for shape in SHAPES:
        if any(isinstance(each, Shard) and each.dim >= len(shape) for each in placements):
            continue
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        shards = distribute_tensor(whole, mesh, placements)
        result = whole_on_device(torch.nn.Parameter(shards))
        is_same = type(result) in (torch.Tensor, torch.nn.Parameter) and result.is_contiguous()
        if not (is_same and result.shape == whole.shape and torch.equal(result, whole)):
            found.append(shape)
    return found


@pytest.mark.parametrize(
    ("placements", "sizes"),
    [
        ((Shard(0),), (2,)),
        ((Shard(1),), (2,)),
        ((Shard(0),), (4,)),
        ((Replicate(), Shard(0)), (2, 2)),
        ((Shard(1), Replicate()), (2, 2)),
        ((Shard(0), Shard(1)), (2, 2)),
        ((Replicate(), Replicate()), (2, 2)),
    ],
)
def test_whole_values(ranks: Any, placements: Any, sizes: tuple[int, ...]) -> None:
    size = 4 if sizes in ((2, 2), (4,)) else 2
    assert ranks(size).run(differing, placements, sizes) == [[]] * size
