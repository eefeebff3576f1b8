"""Whether gloo survives many collectives: torch alone, none of this package. Not a test; run it to see.

    python -m tests.stress_gloo --ranks 4 --seconds 240

On 2026-11-22, on a virtual machine with 2 x86-64 cores and torch 2.13.0+cpu, a longer draft of this script, which also
gathered in two dimensions and in backward, ended once in ten runs of two to ten minutes: SIGABRT, "malloc(): unaligned
tcache chunk detected", in `gloo::allgather` in a thread of `ProcessGroupGloo`, beside other work. The other nine runs
ended well; this shorter script has not crashed. Why is not known. See `Crashes` in `ranks.py`.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks import free_port


def stress(rank: int, size: int, port: int, seconds: float) -> None:
    """Gather shards, and sum their gradients, until the time is over."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("outer", "inner"))
    parameters = [
        nn.Parameter(distribute_tensor(torch.randn(16, 8), mesh[axis], [Shard(dim)]))
        for axis in ("outer", "inner")
        for dim in (0, 1)
    ]
    begin, rounds = time.monotonic(), 0
    goes_on = torch.ones(1)
    while goes_on:
        for _ in range(50):
            for parameter in parameters:
                with torch.no_grad():
                    parameter.full_tensor()
                whole = parameter.redistribute(placements=[Replicate()]).to_local()
                (whole * whole).sum().backward()
                assert parameter.grad is not None
                parameter.grad.full_tensor()  # type: ignore[attr-defined]
                parameter.grad = None
        rounds += 50
        goes_on = torch.tensor([float(time.monotonic() - begin < seconds)])
        dist.broadcast(goes_on, 0)
    if rank == 0:
        print(f"{rounds * len(parameters) * 3} gathers on {size} ranks, and no crash")
    dist.destroy_process_group()


def main() -> None:
    """Run ranks; a crash of one of them ends this with its signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--seconds", type=float, default=240)
    arguments = parser.parse_args()
    parameters = (arguments.ranks, free_port(), arguments.seconds)
    multiprocessing.spawn(stress, parameters, nprocs=arguments.ranks)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
