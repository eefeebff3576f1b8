"""Groups of a mesh have one thread: two of them break the heap, now and then. DDP needs two."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.mesh import build_mesh

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("interface", ["", "lo"])
def test_the_group_of_a_mesh_survives(interface: str) -> None:
    command = [sys.executable, "-m", "tests.stress_gloo", "--made-by", "build_mesh", "--seconds", "3"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": interface}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert "and no crash with 1 threads" in ended.stdout


def threads_of_mesh(degrees: Degrees) -> set[int]:
    mesh = build_mesh(degrees, "cpu")
    meshes = (mesh.devices, mesh.data, mesh.gradients)
    groups = [group for each in meshes for group in each.get_all_groups()]
    groups += [mesh.pipeline_host_group] if mesh.pipeline_host_group is not None else []
    return {_threads(group) for group in groups}


def _threads(group: Any) -> int:
    return int(group._get_backend(torch.device("cpu")).options._threads)


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(shard=4),
        Degrees(replicate=2, shard=2),
        Degrees(shard=2, context=2),
        Degrees(replicate=2, context=2),
        Degrees(tensor=2, pipeline=2),
    ],
)
def test_every_axis_has_one(ranks: Any, degrees: Degrees) -> None:
    assert ranks(4).run(threads_of_mesh, degrees.resolve(world_size=4)) == [{1}] * 4
    assert ranks(4).run(threads_of_the_process) == [2] * 4


@pytest.mark.parametrize("backend", ["gloo", "cpu:gloo"])
def test_however_gloo_is_asked_for(backend: str) -> None:
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        assert threads_of_mesh(Degrees().resolve(world_size=1)) == {1}
    finally:
        dist.destroy_process_group()


def threads_of_the_process() -> int:
    return _threads(dist.group.WORLD)


def test_torch_is_as_it_was() -> None:
    assert dist.distributed_c10d.ProcessGroupGloo is dist.ProcessGroupGloo
