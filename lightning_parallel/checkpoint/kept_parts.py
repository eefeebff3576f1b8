"""Parts of tensors that hooks and callbacks put into a checkpoint, such as averages of weights by name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import whole_on_host
from lightning_parallel.ranks.objects import of_all_ranks

_SHARD, _ELSEWHERE, _WHOLE = range(3)
"""A DTensor; what another pipeline stage has; a plain tensor."""


def with_whole_parts(kept: dict[str, Any], group: ProcessGroup) -> dict[str, Any]:
    """Make parts of tensors whole on rank 0, which writes them. A collective, one tensor at a time.

    Where a rank does not keep what others keep, such as one that skips the hook, all stays as it is.

    Args:
        kept: What is to be written, in dicts, lists and tuples; not in classes of theirs, such as `TensorsOfRanks`.
        group: All ranks, for host memory.

    Returns:
        On rank 0 the same with whole tensors in host memory; elsewhere `kept`.
    """
    flat, spec = tree_flatten_with_path(kept)
    leaves = [leaf for _, leaf in flat]
    places = {keystr(path): place for place, (path, leaf) in enumerate(flat) if isinstance(leaf, Tensor)}
    if not any(of_all_ranks(any(_kind(leaves[place]) != _WHOLE for place in places.values()))):
        return kept
    kinds: list[dict[str, int]] = of_all_ranks({name: _kind(leaves[place]) for name, place in places.items()})
    names = [name for name in kinds[0] if any(each.get(name, _WHOLE) != _WHOLE for each in kinds)]
    if any(name not in each for each in kinds for name in names):
        return kept
    for name in names:
        own, of_ranks = leaves[places[name]], [each[name] for each in kinds]
        whole = None if of_ranks[group.rank()] == _ELSEWHERE else whole_on_host(own)
        if of_ranks[0] == _ELSEWHERE:
            whole = _at_first_rank(whole, own, of_ranks, group)
        leaves[places[name]] = own if whole is None else whole
    return tree_unflatten(leaves, spec) if group.rank() == 0 else kept  # type: ignore[no-any-return]


def _kind(value: Tensor) -> int:
    if isinstance(value, DTensor):
        return _SHARD
    return _ELSEWHERE if is_placeholder(value) else _WHOLE


def _at_first_rank(whole: Tensor | None, own: Tensor, kinds: list[int], group: ProcessGroup) -> Tensor | None:
    """The tensor that another rank has, on the first one."""
    source = next((rank for rank, kind in enumerate(kinds) if kind != _ELSEWHERE), None)
    if source is None:
        return None
    if group.rank() == source and whole is not None:
        dist.send(whole.contiguous(), group=group, group_dst=0)
    if group.rank() == 0:
        whole = torch.empty(own.shape, dtype=own.dtype)
        dist.recv(whole, group=group, group_src=source)
    return whole
