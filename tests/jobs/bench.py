"""Ranks of a bench that end in other ways than they should."""

from __future__ import annotations

import os
import time
from typing import Any

from lightning_parallel.bench.processes import Rank
from lightning_parallel.errors import ConfigurationError


def _meet(rank: Rank) -> None:
    """Wait for the other ranks, which may begin much later: how one ends is to be seen by all."""
    (rank.folder / f"here{rank.number}").touch()
    while len(list(rank.folder.glob("here*"))) < rank.size:
        time.sleep(0.02)


def work(rank: Rank, ways: list[str]) -> None:
    """End in the way of this rank."""
    way = ways[rank.number]
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank.number)
    assert os.environ["WORLD_SIZE"] == str(rank.size)
    assert "SLURM_NTASKS" not in os.environ
    print(f"rank {rank.number} is here", flush=True)
    _meet(rank)
    result: dict[str, Any] = {"number": rank.number}
    if way in ("runs", "counts wrong"):
        rank.hand_over(result)
    if way == "counts wrong":
        raise RuntimeError("a mode is on")
    if way == "refuses":
        raise ConfigurationError(["3 ranks are too many; give 2"])
    if way == "raises":
        raise ValueError("no such sample")
    if way == "dies":
        os._exit(7)
    if way == "hangs":
        time.sleep(600)
