"""Buffers that a stage of a pipeline writes in a step, on all stages after it: hooks read them as in one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.stage_owners import StageOwners


class StageBuffers:
    """Gives buffers that stages write in a step to the other stages.

    Args:
        module: The module, of which each stage has all buffers.
        owners_by_name: Name of a parameter or buffer -> the stages that hold it.
        host_group: The ranks of the pipeline, for host memory.

    Example:
        >>> buffers = StageBuffers(module, owners_by_name, host_group)
        >>> buffers.note()
        >>> ...  # a step
        >>> buffers.share()
    """

    def __init__(self, module: nn.Module, owners_by_name: Mapping[str, StageOwners], host_group: ProcessGroup) -> None:
        self._module, self._host_group = module, host_group
        names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
        self._owners = {name: owners_by_name[name] for name in names if name in owners_by_name}
        self._before: dict[str, tuple[Tensor, int]] = {}

    def note(self) -> None:
        """Note the buffers before a step."""
        self._before = {name: (buffer, _version(buffer)) for name, buffer in self._buffers().items()}

    @torch.no_grad()
    def share(self) -> None:
        """Give each stage the buffers that others have written since `note`. A collective.

        Of several stages that have written one, the owner's is taken.
        """
        if not self._owners:
            return
        written = {
            name: buffer.detach().cpu().clone()
            for name, buffer in self._buffers().items()
            if not is_placeholder(buffer)
            and (name not in self._before or not _is_unwritten(buffer, *self._before[name]))
        }
        is_any = torch.tensor(len(written))
        dist.all_reduce(is_any, op=dist.ReduceOp.MAX, group=self._host_group)
        if not is_any:
            return
        found: list[dict[str, Tensor]] = [{}] * self._host_group.size()
        dist.all_gather_object(found, written, group=self._host_group)
        for name in dict.fromkeys(name for of_stage in found for name in of_stage):
            writers = [rank for rank, of_stage in enumerate(found) if name in of_stage]
            # Where a buffer is used is a guess from the order of registration: it may be another stage that writes it.
            owners = [rank for rank in self._owners[name].ranks if rank in writers]
            source = (owners or writers[::-1])[0]
            if source != self._host_group.rank():
                self._set(name, found[source][name])

    def _buffers(self) -> dict[str, Tensor]:
        named = self._module.named_buffers(remove_duplicate=False)
        return {name: buffer for name, buffer in named if name in self._owners}

    def _set(self, name: str, value: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        table: dict[str, Any] = self._module.get_submodule(path)._buffers
        own = table.get(attribute)
        if own is None or is_placeholder(own) or own.shape != value.shape or own.dtype != value.dtype:
            device = value.device if own is None else own.device
            table[attribute] = value.to(device, copy=True)
        else:
            own.copy_(value)


def _version(buffer: Tensor) -> int:
    return -1 if buffer.is_inference() else buffer._version


def _is_unwritten(buffer: Tensor, before: Tensor, version: int) -> bool:
    return buffer is before and version >= 0 and _version(buffer) == version
