"""Whether a group of gloo survives many gathers. With torch's two threads it does not; a fit makes groups of one.

    python -m tests.stress_gloo --made-by fit --seconds 60
    python -m tests.stress_gloo --made-by torch --seconds 60

The second ends with SIGSEGV, or with SIGABRT and "malloc(): unaligned tcache chunk detected", as long as torch writes
the name of what a thread has finished without a lock. See `gloo_of_one_thread` in `lightning_parallel/_torch.py`.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.cases import ByteGPT, data_of
from tests.parity import make_trainer
from tests.ranks import free_port

SOONER = 200
"""Gathers in flight at once, so that both threads of a group end one at about the same time."""


def main() -> None:
    """Make the group of one process, and gather in it until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--made-by", choices=["fit", "torch"], default="fit")
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.made_by == "torch":
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        dist.init_process_group("gloo", rank=0, world_size=1)
    else:
        make_trainer("fsdp_custom", 1).fit(ByteGPT(), DataLoader(data_of("byte_gpt", 4, 4), batch_size=2))
    assert dist.group.WORLD is not None
    part, end, gathers = torch.ones(4), time.monotonic() + arguments.seconds, 0
    while time.monotonic() < end:
        works = [
            dist.group.WORLD.allgather_into_tensor_coalesced([torch.empty(4)], [part])  # as functional collectives do
            for _ in range(SOONER)
        ]
        for work in works:
            work.wait()
        gathers += SOONER
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    print(f"{gathers} gathers and no crash with {backend.options._threads} threads")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
