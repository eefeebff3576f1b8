"""Numbers that ranks tell each other between steps, in host memory, so that nobody waits for a device."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup


def said_by_all(own: int, group: ProcessGroup) -> list[int]:
    """The number of each rank. A collective: one all-reduce of two numbers where all say the same.

    Args:
        own: This rank's number.
        group: The ranks, for host memory.

    Example:
        >>> said_by_all(int(has_batch), mesh.host_group)  # [1, 0]
    """
    ends = torch.tensor([own, -own])
    dist.all_reduce(ends, op=dist.ReduceOp.MIN, group=group)
    least, most = ends.tolist()
    if least == -most:
        return [own] * group.size()
    said = torch.zeros(group.size(), dtype=torch.int64)
    said[group.rank()] = own
    dist.all_reduce(said, group=group)
    return list(map(int, said.tolist()))
