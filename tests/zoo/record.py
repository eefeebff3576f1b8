"""Run cells of the zoo and write them into its table: ``python -m tests.zoo.record [part of a name ...]``."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

from tests.quiet import silence
from tests.rank_pool import RankPool
from tests.zoo.cells import NAMES, run_cell
from tests.zoo.registry import ZOO

TABLE = Path(__file__).with_name("zoo.json")


def main(parts: list[str]) -> None:
    """Write what each cell of the modules with one of these parts in their names is now."""
    torch.set_num_threads(1)
    silence()
    pools: dict[int, RankPool] = {}

    def ranks(size: int) -> RankPool:
        if size not in pools or not pools[size].is_alive:
            pools[size] = RankPool(size, Path(tempfile.mkdtemp()))
        return pools[size]

    for module in [name for name in ZOO if not parts or any(part == name for part in parts)]:
        for name in NAMES:
            began = time.monotonic()
            word, said = run_cell(ranks, module, name)
            print(f"### {module} {name} {time.monotonic() - began:.1f}s {word}: {said[:1500]}", flush=True)
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main(sys.argv[1:])
