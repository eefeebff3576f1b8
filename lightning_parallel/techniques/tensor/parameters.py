"""Parameters of which each rank keeps a part."""

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
        module: Its own parameters, not those of submodules.
        dims: Name -> the dimension that is split; names that it lacks are passed over.
        mesh: One axis: the ranks that share a matrix product.
        known: What has become of each parameter so far, and grows: one that several modules share is split once.
    """
    for name, dim in dims.items():
        own = module._parameters.get(name)
        if own is None or isinstance(own, DTensor):
            continue
        if own not in known:
            # Without a source rank, every rank cuts its part out of its own copy: no communication.
            part = distribute_tensor(own.detach(), mesh, [Shard(dim)], src_data_rank=None)
            known[own] = nn.Parameter(part, requires_grad=own.requires_grad)
            known[own].__dict__.update(vars(own))
        setattr(module, name, known[own])
