"""Build the device mesh of resolved degrees, and ask it by purpose. Layer 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_parallel import _torch
from lightning_parallel.degrees import Degrees

DATA = "data_parallel"
AXES = {
    "pipeline": "pipeline_parallel",
    "replicate": "data_parallel_replicate",
    "shard": "data_parallel_shard",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}
"""Degree -> axis name in Lightning's spelling, outermost first: neighbours on the last axis are on one machine."""


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid, asked by what one wants to do with it.

    Args:
        degrees: Resolved degrees.
        devices: The mesh of all ranks, with an axis for each degree.
        data: One axis: the ranks that read different samples, over which losses and metrics are reduced.
        host_group: All ranks, for what they agree on in host memory.
    """

    degrees: Degrees
    devices: DeviceMesh
    data: DeviceMesh
    host_group: ProcessGroup

    @property
    def data_group(self) -> ProcessGroup:
        """The process group of :attr:`data`."""
        return self.data.get_group()

    @property
    def data_rank(self) -> int:
        """This process's place among the ranks that read different samples."""
        return self.data.get_local_rank()

    @property
    def sharding(self) -> DeviceMesh:
        """What FSDP2 takes: the axis to shard over, behind the axis to replicate over if there is one."""
        if self.degrees.replicate == 1:
            return self.data
        return self.devices[(AXES["replicate"], AXES["shard"])]


def build_mesh(degrees: Degrees, device_type: str) -> Mesh:
    """Build the mesh of resolved `degrees` on ``"cpu"`` or ``"cuda"``. A collective; needs the process group.

    Example:
        >>> mesh = build_mesh(Degrees().resolve(world_size=4), "cpu")
    """
    sizes = {AXES[name]: getattr(degrees, name) for name in AXES}
    # The shard axis always exists, so that every model is sharded in the same way; other axes of one rank do not.
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == AXES["shard"]}
    if degrees.replicate == 1:
        sizes = {DATA if axis == AXES["shard"] else axis: size for axis, size in sizes.items()}
    devices = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    both = (AXES["replicate"], AXES["shard"])
    data = devices[DATA] if degrees.replicate == 1 else _torch.flattened(devices[both], DATA)
    host_group = data.get_group() if device_type == "cpu" else dist.new_group(backend="gloo")
    assert isinstance(host_group, ProcessGroup)
    return Mesh(degrees, devices, data, host_group)
