"""Splitting of parameters: each rank keeps its part."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def split_parameters(
    module: nn.Module, dims: Mapping[str, int], mesh: DeviceMesh, *, known: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Split parameters of `module` over `mesh`, in place: they become DTensors.

    Args:
        module: The module; only its own parameters are split, not those of submodules.
        dims: Name -> the dimension that is split; names that the module lacks are ignored.
        mesh: One axis: the ranks that share a matrix product.
        known: Parameter -> its replacement so far; grows, so that a parameter of several modules is split once.
    """
    for name, dim in dims.items():
        own = module._parameters.get(name)
        if own is None or isinstance(own, DTensor):
            continue
        if own not in known:
            # Without a source rank, every rank takes its part of its own copy: no communication.
            part = distribute_tensor(own.detach(), mesh, [Shard(dim)], src_data_rank=None)
            known[own] = nn.Parameter(part, requires_grad=own.requires_grad)
            # Keep attributes that others have set on the parameter.
            known[own].__dict__.update(vars(own))
        setattr(module, name, known[own])
