"""One way to read sharded and whole tensors."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


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
