"""One way to read sharded and whole tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_parallel.ranks.collectives import gathered, padded


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_of(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; any other tensor itself. A collective for the former."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_on_host(tensor: Tensor) -> Tensor:
    """The whole of `tensor` in host memory, on every rank. A collective for a DTensor."""
    return whole_on_device(tensor).detach().cpu()


def whole_on_device(tensor: Tensor) -> Tensor:
    """The whole of `tensor` where its process group moves memory, on every rank. A collective for a DTensor."""
    if isinstance(tensor, DTensor):
        if (whole := _gathered_over_one_axis(tensor)) is not None:
            return whole
        # Offloaded shards lie in host memory, while their process group moves device memory.
        on_device: Any = tensor.to(tensor.device_mesh.device_type)
        placements = list(tensor.placements)
        # One axis after the other, the tensor axis last: where FSDP2 shards a dimension that tensor parallel has split,
        # the parts were split before they were sharded.
        for dim in range(len(placements)):
            placements[dim] = Replicate()
            on_device = on_device.redistribute(placements=placements)
        tensor = on_device.to_local()
    return tensor


@torch.no_grad()
def _gathered_over_one_axis(tensor: DTensor) -> Tensor | None:
    """`whole_on_device` for shards of one axis, in one collective; ``None`` for any other placements.

    A DTensor that is redistributed gives the same, and takes several times as long on the host: at the end of a fit,
    that is for each parameter and each of its moments.
    """
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    local = tensor.to_local().detach()
    if len(axes) != 1 or type(tensor.placements[axes[0]]) is not Shard or type(local) is not Tensor:
        return None
    (axis,), mesh = axes, tensor.device_mesh
    placement: Any = tensor.placements[axis]
    length, group = tensor.shape[placement.dim], mesh.get_group(axis)
    part = padded(local.to(mesh.device_type), placement.dim, -(-length // group.size()))
    return gathered(part, placement.dim, length, group)


def sharded_like(value: Tensor, target: DTensor, placements: Any = None) -> Tensor:
    """This rank's part of `value`, which every rank has, as a DTensor. No collective.

    Args:
        value: A whole, plain tensor.
        target: Gives the mesh and the device.
        placements: How it is sharded; by default as `target` is.
    """
    # Without a source rank, every rank takes its shard from its own copy, without communication.
    on_device = value.detach().to(target.device_mesh.device_type)
    shard = distribute_tensor(on_device, target.device_mesh, placements or target.placements, src_data_rank=None)
    return shard.to(target.device)
