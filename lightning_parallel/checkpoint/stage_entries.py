"""Entries of a ``state_dict()`` that are no parameters and no buffers, of layers that other stages run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import whole_on_host
from lightning_parallel.ranks.stage_owners import StageOwners, all_stage_owners, broadcast_object


def take_entries_of_stages(module: nn.Module, entries: dict[str, Any], *, keep: bool, has_parts: bool = False) -> None:
    """Put the values of the stage that runs a layer in place of this rank's own. A collective of each pipeline.

    A layer counts its steps, or keeps scales of fp8, in ``get_extra_state``; hooks of a ``state_dict`` add what they
    like, and give parameters other names.

    Args:
        module: The module, whose stack may be cut.
        entries: Its ``state_dict()``, changed in place.
        keep: Whether this rank wants parameters of other names, which then come one at a time.
        has_parts: Whether each rank keeps its part of these instead.
    """
    owners_by_name = all_stage_owners(module)
    if not owners_by_name:
        return
    group = next(iter(owners_by_name.values())).host_group
    of_module = {tensor.data_ptr() for tensor in (*module.parameters(), *module.buffers()) if _has_memory(tensor)}
    owner = _owner_of_paths(owners_by_name)
    own = []
    for name, value in entries.items():
        leaves = tree_leaves(value)
        is_part = any(_is_part(leaf, of_module) for leaf in leaves)
        if name not in owners_by_name and owner(name.rpartition(".")[0]) == group.rank():
            own += [name] if not (any(map(is_placeholder, leaves)) or (is_part and has_parts)) else []
    found: list[list[str]] = [own] * group.size()
    dist.all_gather_object(found, own, group=group)
    for rank, name in ((rank, name) for rank, names in enumerate(found) for name in names):
        is_here = rank == group.rank()
        value = broadcast_object(tree_map_only(Tensor, _on_host, entries[name]) if is_here else None, rank, group)
        if not is_here and (keep or not is_placeholder(entries.get(name))):
            entries[name] = value


def take_extra_states_of_stages(module: nn.Module) -> None:
    """Give layers the extra state that they have on the stage that runs them. A collective of each pipeline.

    Raises:
        Exception: Of the user's code, on all ranks of the pipeline.
    """
    owners_by_name = all_stage_owners(module)
    if not owners_by_name:
        return
    group = next(iter(owners_by_name.values())).host_group
    owner = _owner_of_paths(owners_by_name)
    have_one = {
        path: child
        for path, child in module.named_modules()
        if type(child).get_extra_state is not nn.Module.get_extra_state
        and type(child).set_extra_state is not nn.Module.set_extra_state
    }
    own: dict[str, Any] = {}
    failed: Exception | None = None
    try:
        # Elsewhere the layer has no values, of which its code may read some.
        mine = [path for path in have_one if owner(path) == group.rank()]
        own = {path: tree_map_only(Tensor, _on_host, have_one[path].get_extra_state()) for path in mine}
    except Exception as error:
        failed = error
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, (own, failed and f"{type(failed).__name__}: {failed}"), group=group)
    if failed is not None:
        raise failed
    for rank, (states, problem) in enumerate(found):
        if problem:
            raise ConfigurationError([_FAILED.format(rank, problem)])
        for path, state in states.items() if rank != group.rank() else ():
            have_one[path].set_extra_state(state)


def _owner_of_paths(owners_by_name: Mapping[str, StageOwners]) -> Callable[[str], int | None]:
    """Tells the rank of a pipeline that runs the module of a path; ``None`` for one that several stages share out."""
    known: dict[str, set[int]] = {}
    for name, owners in owners_by_name.items():
        while name := name.rpartition(".")[0]:
            known[name] = known.get(name, set(owners.ranks)) & set(owners.ranks)

    def owner(path: str) -> int | None:
        while path and path not in known:
            path = path.rpartition(".")[0]
        return min(known.get(path, ()), default=None)

    return owner


def _is_part(leaf: Any, of_module: set[int]) -> bool:
    """Whether it is a parameter or buffer to which a hook has given another name."""
    return isinstance(leaf, DTensor) or (
        isinstance(leaf, Tensor) and _has_memory(leaf) and leaf.data_ptr() in of_module
    )


def _has_memory(tensor: Tensor) -> bool:
    return not (isinstance(tensor, DTensor) or is_placeholder(tensor) or tensor.is_meta) and tensor.numel() > 0


def _on_host(tensor: Tensor) -> Tensor:
    return whole_on_host(tensor.detach())


_FAILED = (
    "get_extra_state of a layer has failed behind the fit on rank {} of the pipeline, with {}; let it read what "
    "the layer has on each rank, or give another strategy than a pipeline"
)
