"""Tags on the parameters of a module whose stack is cut: the ranks of the pipeline that hold each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_parallel import _torch

_OWNERS = "_lightning_parallel_owners"
_ALL_OWNERS = "_lightning_parallel_all_owners"


@dataclass(frozen=True, eq=False)
class StageOwners:
    """The ranks of a pipeline that hold a parameter or buffer.

    Args:
        ranks: Ranks on the pipeline axis; the first is the owner, whose value is taken in collectives.
        group: All ranks of the pipeline.
        host_group: The same ranks, for host memory.
    """

    ranks: tuple[int, ...]
    group: ProcessGroup
    host_group: ProcessGroup

    @property
    def is_here(self) -> bool:
        """Whether this rank holds it."""
        return self.group.rank() in self.ranks

    @property
    def counts_here(self) -> bool:
        """Whether this rank is the owner: sums over parameters, such as norms, count each only there."""
        return self.group.rank() == self.ranks[0]

    @property
    def reaches_first_rank(self) -> bool:
        """Whether rank 0, which saves, is a rank of this pipeline: other pipelines have equal values."""
        return 0 in dist.get_process_group_ranks(self.host_group)

    def from_owner(self, value: Tensor) -> Tensor:
        """The owner's `value`, a tensor in host memory, on all ranks of the pipeline. A collective.

        Args:
            value: Strided; where this rank is not the owner, anything of the same shape and dtype.
        """
        received = value.contiguous() if self.counts_here else torch.empty(value.shape, dtype=value.dtype)
        sent = _torch.dense_parts.travelling(received)
        dist.broadcast(sent, group=self.host_group, group_src=self.ranks[0])
        return received

    def object_from_owner(self, value: Any) -> Any:
        """The owner's `value` on all ranks of the pipeline. A collective."""
        return broadcast_object(value, self.ranks[0], self.host_group)


def broadcast_object(value: Any, source: int, group: ProcessGroup) -> Any:
    """Return the value of one rank on all ranks of a group. A collective.

    Args:
        value: Any object that can be pickled; ignored on other ranks than `source`.
        source: The rank in `group`.
        group: The ranks, for host memory.
    """
    box = [value if group.rank() == source else None]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def tag_owners(module: nn.Module, owners_by_name: Mapping[str, StageOwners]) -> None:
    """Tag the parameters of a module with their owner ranks; buffers are listed on the module itself.

    Args:
        module: The module on which the tags are put.
        owners_by_name: Name of a parameter or buffer -> the ranks that hold it.
    """
    for name, parameter in module.named_parameters(remove_duplicate=False):
        setattr(parameter, _OWNERS, owners_by_name[name])
    # No dict: those on a module are taken for attributes that the user's hooks have set.
    module.__dict__[_ALL_OWNERS] = MappingProxyType(dict(owners_by_name))


def untag_owners(module: nn.Module) -> None:
    """Remove the tags from the parameters of a `module` that every rank has whole again."""
    for parameter in module.parameters():
        vars(parameter).pop(_OWNERS, None)


def stage_owners_of(parameter: Tensor) -> StageOwners | None:
    """The ranks of a pipeline that hold `parameter`; ``None`` without a pipeline."""
    return getattr(parameter, _OWNERS, None)


def all_stage_owners(module: nn.Module) -> Mapping[str, StageOwners]:
    """Name of a parameter or buffer -> the ranks of a pipeline that hold it; empty without a pipeline."""
    found: Mapping[str, StageOwners] = module.__dict__.get(_ALL_OWNERS, {})
    return found
