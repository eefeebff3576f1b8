"""Units of FSDP2, their parameters and the order of their calls: private or version-dependent names of torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule


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
