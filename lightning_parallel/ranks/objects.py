"""Objects of ranks, which are pickled: what few bytes are for."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup


def is_shared() -> bool:
    """Whether there are other ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def of_all_ranks(own: Any) -> list[Any]:
    """Gather the value of each rank. A collective."""
    if not is_shared():
        return [own]
    found = [own] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def at_first_rank(own: Any, group: ProcessGroup | None) -> list[Any]:
    """Gather the value of each rank on the first one; others get an empty list. A collective.

    Args:
        own: This rank's value.
        group: The ranks, for host memory; ``None`` for one process.
    """
    if group is None or group.size() == 1:
        return [own]
    found: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
    dist.gather_object(own, found, group=group, group_dst=0)
    return found or []


def from_first_rank(values: list[Any], group: ProcessGroup | None) -> Any:
    """This rank's value of those that the first one has for all. A collective.

    Args:
        values: One for each rank; those of other ranks than the first are not used.
        group: The ranks, for host memory; ``None`` for one process.
    """
    if group is None or group.size() == 1:
        return values[0]
    box: list[Any] = [None]
    dist.scatter_object_list(box, values if group.rank() == 0 else None, group=group, group_src=0)
    return box[0]
