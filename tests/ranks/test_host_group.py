"""Groups on the host beside those of devices."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel import _torch
from lightning_parallel.ranks.mesh import build_host_group


def sum_in_nested_contexts() -> float:
    """A mesh makes the group of the host inside of the context in which it makes its own, where ranks have GPUs."""
    with _torch.groups.gloo_of_one_thread():
        group = build_host_group("cuda")  # another than the process group, as it is for devices
        with _torch.groups.gloo_of_one_thread():
            inner = dist.new_group(backend="gloo")
    of_torch = dist.distributed_c10d.ProcessGroupGloo
    assert not hasattr(of_torch, "_has_one_thread")
    assert group is not dist.group.WORLD
    values = torch.ones(())
    dist.all_reduce(values, group=group)
    dist.all_reduce(values, group=inner)
    return float(values)


def test_contexts_inside_of_each_other(ranks: Any) -> None:
    assert ranks(2).run(sum_in_nested_contexts) == [4.0, 4.0]
