"""Units of FSDP2, their parameters and the order of their calls: private or version-dependent names of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def parameter_groups(unit: FSDPModule) -> list[Any]:
    """`FSDPState._fsdp_param_groups`, since 2.13, and `_fsdp_param_group` before; no public spelling."""
    state = unit._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


def sharded_parameters(unit: FSDPModule) -> list[Tensor]:
    """The shards of the parameters of `unit`, in an order that all ranks share."""
    return [parameter.sharded_param for group in parameter_groups(unit) for parameter in group.fsdp_params]


def forward_order(units: Sequence[FSDPModule]) -> list[int]:
    """The numbers of `units` in the order in which their forward has run since the last backward.

    `FSDPCommContext.post_forward_order`, since 2.4, by which torch gathers parameters ahead; no public spelling.
    """
    groups = [(number, group) for number, unit in enumerate(units) for group in parameter_groups(unit)]
    numbers = {id(group): number for number, group in groups}
    ran = getattr(groups[0][1], "comm_ctx", None) if groups else None
    return [numbers[id(group)] for group in tuple(ran.post_forward_order) if id(group) in numbers] if ran else []


def gathered_parameters(unit: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of a parameter's shard and its gathered form, for those of `unit` that were gathered before.

    `FSDPParam._unsharded_param`, since 2.4; no public spelling.
    """
    assert isinstance(unit, FSDPModule)
    for group in parameter_groups(unit):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.sharded_param, parameter._unsharded_param


def written_while_gathered(unit: nn.Module) -> list[tuple[nn.Module, str]]:
    """The parameters of `unit`, by module and name, whose gathered values are no longer those of this rank's shard.

    Contents are compared: what is written through ``parameter.data`` counts for no version. `FSDPParam.sharded_state`,
    `fsdp_placement`, `mesh_info` and `_module_info`, since 2.4; no public spelling.
    """
    assert isinstance(unit, FSDPModule)
    parameters = [parameter for group in parameter_groups(unit) for parameter in group.fsdp_params]
    gathered = [each for each in parameters if each.sharded_state.name == "UNSHARDED"]
    return [(each._module_info.module, each._module_info.param_name) for each in gathered if _is_other(each)]


def _is_other(parameter: Any) -> bool:
    shard, whole = _local(parameter.sharded_param), _local(parameter._unsharded_param).detach()
    if hasattr(shard, "fsdp_post_all_gather") or whole.ndim != shard.ndim:  # it has a form of its own
        return False
    dim, size = parameter.fsdp_placement.dim, getattr(parameter.mesh_info, "shard_mesh_size", 1)
    if whole.ndim <= dim:
        part = whole
    else:
        step = -(-whole.shape[dim] // size)
        start = min(getattr(parameter.mesh_info, "shard_mesh_rank", 0) * step, whole.shape[dim])
        part = whole.narrow(dim, start, min(step, whole.shape[dim] - start))
    if part.shape != shard.shape:
        return False
    expected = shard.detach().to(part.device, part.dtype)
    # As bytes: what is not a number equals itself.
    return not torch.equal(part.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
