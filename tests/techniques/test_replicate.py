"""Copies of a module on all ranks."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.techniques.replicate import reduce_gradients, synchronize_module


def reduce_some() -> list[Any]:
    rank = dist.get_rank()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    parameters[0].grad = torch.full((2,), float(rank + 1))
    if rank == 1:
        parameters[1].grad = torch.full((2,), 4.0)
    host_group = dist.new_group(backend="gloo")
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as reduce:
        reduce_gradients(parameters, dist.group.WORLD, host_group)
    # Flags that were reduced on the device would have to be waited for.
    found = [(call.args[0].dtype, call.kwargs["group"] is host_group) for call in reduce.call_args_list]
    assert found == [(torch.uint8, True), (torch.float32, False)]
    return [None if p.grad is None else p.grad.tolist() for p in parameters]


def test_gradients_are_averaged_also_where_a_rank_has_none(ranks: Any) -> None:
    assert ranks(2).run(reduce_some) == [[[1.5, 1.5], [2.0, 2.0], None]] * 2


def synchronized() -> list[list[float]]:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].running_mean.fill_(float(dist.get_rank()))
    synchronize_module(module, torch.device("cpu"))
    return [tensor.flatten().tolist() for tensor in module.state_dict().values()]


def test_all_ranks_start_from_rank_0(ranks: Any) -> None:
    first, second = ranks(2).run(synchronized)
    assert first == second
