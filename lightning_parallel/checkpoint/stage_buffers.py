"""Buffers of the stages of a pipeline, on all ranks, when the module becomes plain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from lightning_parallel import _torch
from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.ranks.stage_owners import StageOwners


@torch.no_grad()
def take_buffers_of_stages(
    module: nn.Module, owners_by_name: Mapping[str, StageOwners], host_group: ProcessGroup | None
) -> None:
    """Give every rank the buffers of all stages, in the sizes that they have now. A collective.

    A step may have given a buffer another size, or registered new ones; the latter stay on the ranks of their stage.

    Args:
        module: The module.
        owners_by_name: Name of a buffer -> the stages that hold it.
        host_group: The ranks that share the stack, in host memory.
    """
    buffers = module.named_buffers(remove_duplicate=False)
    own = {
        name: (buffer.shape, buffer.layout is torch.strided, _torch.dense_parts.shared_dims(buffer))
        for name, buffer in buffers
        if name in owners_by_name and owners_by_name[name].counts_here
    }
    forms: list[Any] = [None] * dist.get_world_size(host_group)
    dist.all_gather_object(forms, own, group=host_group)
    for name, (shape, is_strided, shared) in ((name, form) for of_stage in forms for name, form in of_stage.items()):
        path, _, attribute = name.rpartition(".")
        table: dict[str, Any] = module.get_submodule(path)._buffers
        before, owners = table[attribute], owners_by_name[name]
        if not is_strided:  # how many values it has, only its owner knows
            value = owners.object_from_owner(before.detach().cpu() if owners.counts_here else None)
            table[attribute] = before if owners.counts_here else value.to(before.device)
        elif owners.counts_here:
            whole(before, owners)
        else:
            is_alike = before.shape == shape and _torch.dense_parts.shared_dims(before) == shared
            places = [1 if dim in shared else size for dim, size in enumerate(shape)]
            made = torch.empty(places, dtype=before.dtype, device=before.device).expand(shape)
            received = before if is_alike else made
            _torch.dense_parts.write(received, whole(received, owners))
            table[attribute] = received
