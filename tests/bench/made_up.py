"""Results that nobody has measured."""

from __future__ import annotations

from typing import Any

from lightning_parallel.bench.cells import Cell, Run, cells_of
from lightning_parallel.bench.processes import RAN, REFUSED, Ending
from lightning_parallel.bench.results import Result, result_of

CELLS = cells_of(["fast", "slow", "never"], [1, 2], "both")
REASON = "2 ranks are too many for never; give 1"


def rank(seconds: float, samples: int, *, sent: int = 100, tokens: int | None = 640) -> dict[str, Any]:
    """What one rank hands over."""
    return {
        "seconds": seconds,
        "samples": samples,
        "tokens": tokens,
        "memory": 2**20,
        "is_memory_of_steps": True,
        "collectives": {"all-reduce": [2, sent]},
    }


def result(cell: Cell, repeat: int, seconds: float) -> Result:
    """Of a run on as many ranks as the cell has devices; the last one is the slowest, and sends the most."""
    ranks = [rank(seconds * (n + 1) / cell.devices, 10 * cell.batches, sent=100 * (n + 1)) for n in range(cell.devices)]
    return result_of(Run(cell, repeat), Ending(RAN, ranks=ranks))


def results() -> list[Result]:
    """Three repeats of two rows, the second of which does not scale; the third is refused on two devices."""
    found = []
    for cell in CELLS:
        if cell.row == "never" and cell.devices > 1:
            found.append(result_of(Run(cell, 0), Ending(REFUSED, REASON)))
            continue
        work = cell.batches / (cell.devices if cell.row == "fast" else 1)
        found += [result(cell, repeat, work * (1.0 + 0.1 * repeat)) for repeat in range(3)]
    return found
