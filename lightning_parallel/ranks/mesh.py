"""Build the device mesh of resolved degrees, with names for the purposes of its axes."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_parallel import _torch
from lightning_parallel.ranks.degrees import Degrees

DATA = "data_parallel"
_SHARDS = "data_parallel_shard_context"
_GRADIENTS = "data_parallel_context"
AXES = {
    "pipeline": "pipeline_parallel",
    "replicate": "data_parallel_replicate",
    "shard": "data_parallel_shard",
    "context": "context_parallel",
    "tensor": "tensor_parallel",
}
"""Degree -> axis name in Lightning's spelling, outermost first, where no other degree is to be the innermost."""


@dataclass(frozen=True)
class Mesh:
    """The ranks as a grid; each attribute is the part of it for one purpose.

    Args:
        degrees: Resolved degrees.
        devices: The mesh of all ranks, with an axis for each degree.
        data: One axis: the ranks that read different samples, over which losses and metrics are reduced.
        sharding: The mesh for FSDP2: the axis to replicate over if there is one, then the axis to shard over.
        gradients: One axis: the ranks whose gradients are averaged; they read other samples or other parts of these.
        host_group: All ranks, for decisions taken together in host memory.
        stage_host_group: The ranks that hold the same layers, in host memory: all of them without a pipeline.
        pipeline_host_group: The ranks that share a stack stage by stage, in host memory; ``None`` without a pipeline.
    """

    degrees: Degrees
    devices: DeviceMesh
    data: DeviceMesh
    sharding: DeviceMesh
    gradients: DeviceMesh
    host_group: ProcessGroup
    stage_host_group: ProcessGroup
    pipeline_host_group: ProcessGroup | None = None

    @property
    def pipeline_group(self) -> ProcessGroup | None:
        """The ranks that share a stack of layers, stage by stage; ``None`` if each has all of it."""
        return self.devices[AXES["pipeline"]].get_group() if self.degrees.pipeline != 1 else None

    @property
    def gradient_group(self) -> ProcessGroup:
        """The process group of :attr:`gradients`."""
        return self.gradients.get_group()

    @property
    def context_group(self) -> ProcessGroup | None:
        """The ranks that share a sequence; ``None`` if each has its own."""
        return self.devices[AXES["context"]].get_group() if self.degrees.context != 1 else None

    @property
    def tensor(self) -> DeviceMesh | None:
        """One axis: the ranks that share a matrix product; ``None`` if each has its own."""
        return self.devices[AXES["tensor"]] if self.degrees.tensor != 1 else None

    @property
    def shares_samples(self) -> bool:
        """Whether several ranks read the same samples."""
        return bool(self._sharing)

    @property
    def is_first_reader(self) -> bool:
        """Whether this process comes first among those that read the same samples, as rank 0 does."""
        return all(self.devices[axis].get_local_rank() == 0 for axis in self._sharing)

    @property
    def _sharing(self) -> list[str]:
        return [AXES[name] for name in ("pipeline", "context", "tensor") if getattr(self.degrees, name) != 1]

    @property
    def data_rank(self) -> int:
        """This process's place among the ranks that read different samples."""
        return self.data.get_local_rank()


@dataclass
class _Built:
    """The meshes of a process group so far, by the arguments of :func:`build_mesh`."""

    world: ProcessGroup | None = None
    meshes: dict[tuple[Degrees, str, str, timedelta | None], Mesh] = field(default_factory=dict)
    host_groups: dict[str, ProcessGroup] = field(default_factory=dict)


_built = _Built()


def build_mesh(
    degrees: Degrees, device_type: str, *, innermost: str = "tensor", timeout: timedelta | None = None
) -> Mesh:
    """Build the mesh of resolved `degrees`. A collective; needs the process group.

    The same arguments give the same mesh again, as long as the process group lives: each group of a mesh keeps threads,
    connections and, under NCCL, memory of the device until then, and a process may fit many times.

    Args:
        degrees: The ranks on each axis.
        device_type: The type of the ranks' devices, ``"cpu"`` or ``"cuda"``.
        innermost: The degree whose ranks are neighbours, and therefore on one machine as far as they fit there.
        timeout: The time for which collectives wait for a missing rank; by default torch's.

    Example:
        >>> mesh = build_mesh(Degrees().resolve(world_size=4), "cpu")
    """
    _forget_dead_groups()
    key = (degrees, device_type, innermost, timeout)
    if key not in _built.meshes:
        with _torch.groups.gloo_of_one_thread():
            _built.meshes[key] = _new_mesh(degrees, device_type, innermost)
        if timeout is not None:
            for group in _groups(_built.meshes[key]):
                _torch.groups.set_timeout(group, timeout)
    return _built.meshes[key]


def build_host_group(device_type: str, *, timeout: timedelta | None = None) -> ProcessGroup:
    """Build a group of all ranks for host memory, once for each process group. A collective; needs the process group.

    Flags and shapes are exchanged there, so that no rank waits for its device, and what is too large for the device.

    Args:
        device_type: The type of the ranks' devices; on the host it is the process group itself.
        timeout: The time for which collectives wait for a missing rank; by default torch's.
    """
    _forget_dead_groups()
    if device_type not in _built.host_groups:
        with _torch.groups.gloo_of_one_thread():
            group = dist.group.WORLD if device_type == "cpu" else dist.new_group(backend="gloo")
        assert isinstance(group, ProcessGroup)
        _built.host_groups[device_type] = group
    if timeout is not None:
        _torch.groups.set_timeout(_built.host_groups[device_type], timeout)
    return _built.host_groups[device_type]


def _forget_dead_groups() -> None:
    """Forget groups of a process group that was destroyed; the next fit of this process makes new ones."""
    assert dist.group.WORLD is not None
    if _built.world is not dist.group.WORLD:
        _built.world, _built.meshes, _built.host_groups = dist.group.WORLD, {}, {}


def data_rank_of(rank: int, degrees: Degrees, *, innermost: str = "tensor") -> int:
    """The place of a rank among those that read different samples, as `build_mesh` orders them; needs no group.

    Args:
        rank: Its number among all ranks.
        degrees: Resolved degrees.
        innermost: As for `build_mesh`.
    """
    names = _outermost_first(innermost)
    inside = names[names.index("shard") + 1 :]
    return rank // math.prod(int(getattr(degrees, name)) for name in inside) % degrees.data


def _outermost_first(innermost: str) -> list[str]:
    """Degrees in the order of the axes. The sort is stable: `innermost` moves to the end, the others keep theirs."""
    return sorted(AXES, key=lambda name: name == innermost)


def _groups(mesh: Mesh) -> list[ProcessGroup]:
    meshes = (mesh.devices, mesh.data, mesh.sharding, mesh.gradients)
    groups = [group for each in meshes for group in each.get_all_groups()]
    host = (mesh.host_group, mesh.stage_host_group, mesh.pipeline_host_group)
    return [*groups, *(group for group in host if group is not None)]


def _new_mesh(degrees: Degrees, device_type: str, innermost: str) -> Mesh:
    sizes = {AXES[name]: getattr(degrees, name) for name in _outermost_first(innermost)}
    # The shard axis always exists, so that every model is sharded in the same way; other axes of one rank do not.
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == AXES["shard"]}
    if degrees.replicate == 1:
        sizes = {DATA if axis == AXES["shard"] else axis: size for axis, size in sizes.items()}
    backend = _own_backend(device_type)
    own: Any = None if backend is None else dict.fromkeys(sizes, backend)
    devices = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes), backend_override=own)
    data, sharding, gradients = _data_meshes(devices, degrees)
    world = build_host_group(device_type)
    if degrees.pipeline == 1:
        return Mesh(degrees, devices, data, sharding, gradients, world, world)
    stages = devices.mesh.movedim(list(sizes).index(AXES["pipeline"]), 0).flatten(1)  # a row for each of its ranks
    stage, pipeline = _host_group(stages.tolist()), _host_group(stages.t().tolist())
    return Mesh(degrees, devices, data, sharding, gradients, world, stage, pipeline)


def _own_backend(device_type: str) -> str | None:
    """The backend of the mesh's own groups; ``None`` if an axis of all ranks may share the group of the process.

    Under gloo it may not: see `_torch.groups.gloo_of_one_thread`.
    """
    return "gloo" if device_type == "cpu" and "cpu:gloo" in dist.get_backend_config().split(",") else None


def _host_group(all_ranks: list[list[int]]) -> ProcessGroup:
    """This rank's group of several, for host memory. A collective of all ranks."""
    group, _ = dist.new_subgroups_by_enumeration(all_ranks, backend="gloo")
    assert isinstance(group, ProcessGroup)
    return group


def _data_meshes(devices: DeviceMesh, degrees: Degrees) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """The meshes `data`, `sharding` and `gradients` of :class:`Mesh`.

    Ranks that share a sequence have gradients of different parts of it, so parameters are sharded over them as well.
    """
    replicate, shard, context = AXES["replicate"], AXES["shard"], AXES["context"]
    flattened = functools.partial(_torch.groups.flattened, backend=_own_backend(devices.device_type))
    has_context = degrees.context != 1
    if degrees.replicate == 1:
        data = devices[DATA]
        gradients = flattened(devices[(DATA, context)], _GRADIENTS) if has_context else data
        return data, gradients, gradients
    data = flattened(devices[(replicate, shard)], DATA)
    if not has_context:
        return data, devices[(replicate, shard)], data
    shards = flattened(devices[(shard, context)], _SHARDS)
    gradients = flattened(devices[(replicate, shard, context)], _GRADIENTS)
    return data, _torch.groups.concatenated([devices[replicate], shards]), gradients
