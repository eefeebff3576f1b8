"""Run cells of the zoo and write them into its table: ``python -m tests.zoo.record [module ...]``."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tests.quiet import silence
from tests.rank_pool import RankPool
from tests.zoo.cells import NAMES, run_cell
from tests.zoo.packages import lacking
from tests.zoo.registry import ZOO

TABLE = Path(__file__).with_name("zoo.json")
MOST_LETTERS = 160
"""Of what is said; the table has its beginning, up to the end of a word."""
SENTENCES = (
    "could not be run on hidden states, and what the names of its arguments suggest, to see what flows through it",
    "computes no attention by itself either",
    "does not call torch's scaled_dot_product_attention, which is what ranks share under context parallel; for Hugging "
    "Face models that have it give attn_implementation='sdpa'",
    "A layer that makes positions by itself, or mixes positions outside of scaled_dot_product_attention, cannot work "
    "on a part of the sequence",
    "each rank has a part of the sequence",
    "fails on a part of the sequence",
    "fewer than the 2 stages of pipeline=2",
    "which only another pipeline stage computes or holds",
    "works layer by layer, and ImageClassifier has no stack of repeated layers",
    "outside of the layer that owns it (a penalty over parameters(), a weight that is used twice), where a pipeline "
    "stage does not have it",
)
"""What messages say of several modules, beside names and numbers that differ."""


def main(modules: list[str]) -> None:
    """Write what each cell of these modules, or of all, is now. A reader of the difference judges whether it may be."""
    torch.set_num_threads(1)
    silence()
    cells = json.loads(TABLE.read_text())["cells"] if TABLE.is_file() else {}
    pools: dict[int, RankPool] = {}

    def ranks(size: int) -> RankPool:
        if size not in pools or not pools[size].is_alive:
            pools[size] = RankPool(size, Path(tempfile.mkdtemp()))
        return pools[size]

    for module in modules or list(ZOO):
        if others := lacking(ZOO[module].packages):
            sys.exit(f"{module} needs {others}; pip install -e '.[zoo]'")
        cells[module] = {name: record(ranks, module, name) for name in NAMES}
        write({name: cells[name] for name in ZOO if name in cells})
    for pool in pools.values():
        pool.close()


def record(ranks: Any, module: str, name: str) -> str:
    """Run a cell; returns what the table says of it."""
    began = time.monotonic()
    word, said = run_cell(ranks, module, name)
    print(f"{module} {name}, {time.monotonic() - began:.1f} s: {word}: {said}", flush=True)
    return word if word == "runs" else f"{word}: {beginning(said)}"


def beginning(said: str) -> str:
    """The sentence that says why, without what differs by model; or the first one."""
    first = said.splitlines()[0]
    for sentence in SENTENCES:
        if sentence in first:
            return sentence
    first = re.sub(r"^model[\w.]* \(\w+\) ", "", first).partition("; ")[0]
    return first if len(first) <= MOST_LETTERS else first[:MOST_LETTERS].rpartition(" ")[0]


def write(cells: dict[str, dict[str, str]]) -> None:
    table = {"names": list(NAMES), "modules": list(cells), "cells": cells}
    TABLE.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
