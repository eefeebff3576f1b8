"""Writes of a step into gathered parameters, which are lost when these are freed: refused in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.differences import first_of

ALWAYS = 4
"""Looks one after the other, before there are fewer: a teacher that begins as its student is equal to it at first."""


class LostWrites:
    """Looks whether a step has written into gathered parameters, in its first backwards and then ever more rarely.

    A rank keeps shards, and FSDP2 gathers them anew: what a step writes through ``parameter.data``, as momentum
    encoders do (He et al. 2020), or clips so, would be lost without a word.

    Args:
        module: The sharded module.
        units: Its units.
        group: The ranks that share parameters, with a backend for host memory.

    Example:
        >>> writes = LostWrites(module, units, group)
        >>> writes.look()  # before each backward
    """

    def __init__(self, module: nn.Module, units: Sequence[nn.Module], group: ProcessGroup) -> None:
        self._module, self._group = module, group
        self._units = [unit for unit in units if isinstance(unit, FSDPModule)]
        self._num_looks = 0

    def look(self) -> None:
        """Refuse a step that has written. Call it before its backward, on all ranks; a collective where it looks.

        Raises:
            ConfigurationError: On all ranks, if one of them has found a write.
        """
        self._num_looks += 1
        number = self._num_looks
        if not self._units or (number > ALWAYS and number & (number - 1)):
            return
        found = [each for unit in self._units for each in _torch.unit_parameters.written_while_gathered(unit)]
        any_has = torch.tensor(bool(found), dtype=torch.uint8)
        if self._group.size() > 1:
            dist.all_reduce(any_has, op=dist.ReduceOp.MAX, group=self._group)
        if not any_has:
            return
        paths = {id(child): path for path, child in self._module.named_modules()}
        names = [f"{paths.get(id(holder), '')}.{name}".strip(".") for holder, name in found]
        raise ConfigurationError(
            [
                f"the step writes into {first_of(names) if names else 'parameters'} while they are gathered, such as "
                "through `parameter.data`; each rank keeps its shard only, and the change would be lost. Write in a "
                "hook, such as on_train_batch_end, where parameters are their shards, or give zero1_custom"
            ]
        )
