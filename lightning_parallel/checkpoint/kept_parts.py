"""Parts of tensors that hooks and callbacks put into a checkpoint, such as averages of weights by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

    Where ranks do not keep parts of the same tensor, such as one that skips the hook, it stays as it is.

    Args:
        kept: What is to be written, in dicts, lists and tuples; not in classes of theirs, such as `TensorsOfRanks`.
        group: All ranks, for host memory.

    Returns:
        On rank 0 the same with whole tensors in host memory; elsewhere `kept`.
    """
    flat, spec = tree_flatten_with_path(kept)
    leaves = [leaf for _, leaf in flat]
    places = {keystr(path): place for place, (path, leaf) in enumerate(flat) if isinstance(leaf, Tensor)}
    if not any(of_all_ranks(any(_form(leaves[place]).kind != _WHOLE for place in places.values()))):
        return kept
    forms: list[dict[str, _Form]] = of_all_ranks({name: _form(leaves[place]) for name, place in places.items()})
    parts = [name for name in forms[0] if any(each[name].kind != _WHOLE for each in forms if name in each)]
    names = [name for name in parts if _is_of_one([each.get(name) for each in forms])]
    for name in names:
        own, kinds = leaves[places[name]], [each[name].kind for each in forms]
        whole = None if kinds[group.rank()] == _ELSEWHERE else whole_on_host(own)
        if kinds[0] == _ELSEWHERE:
            whole = _at_first_rank(whole, own, kinds, group)
        leaves[places[name]] = own if whole is None else whole
    return tree_unflatten(leaves, spec) if group.rank() == 0 else kept  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Form:
    """The form of a tensor on one rank.

    Args:
        kind: `_SHARD`, `_ELSEWHERE` or `_WHOLE`.
        tensor: Its shape and dtype, in words.
        ranks: Those that have parts of it.
        placements: How it is cut, in words.
    """

    kind: int
    tensor: str
    ranks: tuple[int, ...] = ()
    placements: str = ""


def _form(value: Tensor) -> _Form:
    tensor = f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, DTensor):
        ranks = tuple(value.device_mesh.mesh.flatten().tolist())
        return _Form(_SHARD, tensor, ranks, str(value.placements))
    return _Form(_ELSEWHERE if is_placeholder(value) else _WHOLE, tensor)


def _is_of_one(forms: Sequence[_Form | None]) -> bool:
    """Whether what ranks have are parts of one tensor, all of them: else, some would wait for others in vain."""
    known = [form for form in forms if form is not None]
    if len(known) < len(forms) or len({form.tensor for form in known}) > 1:
        return False
    shards = [(rank, form) for rank, form in enumerate(known) if form.kind == _SHARD]
    if shards and any(form.kind == _WHOLE for form in known):
        return False
    return all(known[other] == form and rank in form.ranks for rank, form in shards for other in form.ranks)


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
