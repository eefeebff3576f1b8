"""Whether a group of gloo survives many gathers. With torch's two threads it does not; that of a mesh has one.

    python -m tests.stress_gloo --made-by build_mesh --seconds 60
    python -m tests.stress_gloo --made-by torch --seconds 60

The second ends with SIGSEGV, or with SIGABRT and "malloc(): unaligned tcache chunk detected", as long as torch writes
the name of what a thread has finished without a lock. See `_torch.groups.gloo_of_one_thread`.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.mesh import build_mesh
from tests.rank_pool import free_port

SOONER = 200
"""Gathers in flight at once, so that both threads of a group end one at about the same time."""


def main() -> None:
    """Make the group of one process, and gather in it until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--made-by", choices=["build_mesh", "torch"], default="build_mesh")
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("gloo", rank=0, world_size=1)
    group: Any = dist.group.WORLD
    if arguments.made_by == "build_mesh":
        group = build_mesh(Degrees().resolve(world_size=1), "cpu").gradient_group
    part, end, gathers = torch.ones(4), time.monotonic() + arguments.seconds, 0
    while time.monotonic() < end:
        works = [
            group.allgather_into_tensor_coalesced([torch.empty(4)], [part])  # as functional collectives do
            for _ in range(SOONER)
        ]
        for work in works:
            work.wait()
        gathers += SOONER
    threads = group._get_backend(torch.device("cpu")).options._threads
    print(f"{gathers} gathers and no crash with {threads} threads")


if __name__ == "__main__":
    main()
