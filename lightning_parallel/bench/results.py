"""Results of finished runs, kept in a file from which an interrupted bench goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_parallel.bench.cells import Cell, Run
from lightning_parallel.bench.collectives import num_bytes
from lightning_parallel.bench.processes import ENDED, RAN, Ending
from lightning_parallel.bench.summary import Summary, summarised
from lightning_parallel.errors import ConfigurationError

FORMAT = 1


@dataclass(frozen=True)
class Result:
    """The end of one run, and what was measured in it.

    Args:
        row: The name of the row.
        devices: The number of devices.
        batches: The global batch, in batches of the recipe's loader.
        repeat: The number of the repeat, from 0.
        outcome: ``"ran"``, ``"refused"`` or ``"ended"``.
        reason: Why it did not run, or why collectives were not counted.
        day: The day in UTC.
        seconds: Of a step, on the slowest rank.
        samples: Of a step, over all ranks.
        tokens: Likewise; ``None`` where batches have none.
        memory_bytes: The most that a rank had in a timed step, over what it had before the module was built.
        is_memory_of_steps: Whether that peak is one of the timed steps, and not of the whole run.
        collectives: Kind -> calls of a step and their bytes, of the rank with the most bytes.
    """

    row: str
    devices: int
    batches: int
    repeat: int
    outcome: str
    reason: str = ""
    day: str = ""
    seconds: float | None = None
    samples: int | None = None
    tokens: int | None = None
    memory_bytes: int | None = None
    is_memory_of_steps: bool | None = None
    collectives: Mapping[str, Sequence[int]] | None = None

    def is_of(self, run: Run) -> bool:
        """Whether it is the result of `run`. Weak and strong scaling may share it."""
        return self.is_in(run.cell) and self.repeat == run.repeat

    def is_in(self, cell: Cell) -> bool:
        """Whether it is a result of `cell`."""
        return (self.row, self.devices, self.batches) == (cell.row, cell.devices, cell.batches)


def result_of(run: Run, ending: Ending) -> Result:
    """The result of a run, from what its ranks have handed over."""
    cell = run.cell
    day = datetime.now(UTC).date().isoformat()
    kept = Result(cell.row, cell.devices, cell.batches, run.repeat, ending.outcome, ending.reason, day)
    if ending.outcome != RAN:
        return kept
    ranks = ending.ranks
    counted = [rank["collectives"] for rank in ranks if rank["collectives"] is not None]
    return Result(
        **{
            **vars(kept),
            "seconds": max(rank["seconds"] for rank in ranks),
            "samples": ranks[0]["samples"],
            "tokens": ranks[0]["tokens"],
            "memory_bytes": max(rank["memory"] for rank in ranks),
            "is_memory_of_steps": all(rank["is_memory_of_steps"] for rank in ranks),
            "collectives": max(counted, key=num_bytes) if len(counted) == len(ranks) else None,
        }
    )


class Results:
    """All results so far, in a file that is written anew after each run.

    Args:
        path: The file.
        fixed: What has to be the same for results to stand in one table: the recipe, the steps, versions, the machine.
        arguments: Those of the command, which are kept beside the results.
    """

    def __init__(self, path: Path, fixed: Mapping[str, Any], arguments: Sequence[str] = ()) -> None:
        self._path, self._arguments = path, list(arguments)
        self._fixed = json.loads(json.dumps(fixed))
        self.runs: list[Result] = []

    def load(self) -> None:
        """Take up what an earlier bench has finished. Runs that ended with an error are tried again.

        Raises:
            ConfigurationError: If the file is none of a bench, or one of another recipe, machine, version...
        """
        if not self._path.exists():
            return
        try:
            found = json.loads(self._path.read_text())
            fixed, runs = found["fixed"], [Result(**each) for each in found["runs"]]
            is_known = found["format"] == FORMAT
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ConfigurationError([_unreadable(self._path, error)]) from None
        if not is_known:
            raise ConfigurationError([_unreadable(self._path, f"format {found['format']}")])
        if others := _differences(fixed, self._fixed):
            raise ConfigurationError([_of_another(self._path, others)])
        self.runs = [run for run in runs if run.outcome != ENDED]

    def has(self, run: Run) -> bool:
        """Whether `run` is done, or its cell can't run: then no other repeat can."""
        own = [result for result in self.runs if result.is_in(run.cell)]
        return any(result.is_of(run) or result.outcome != RAN for result in own)

    def add(self, result: Result) -> None:
        """Keep one more."""
        self.runs.append(result)

    def summaries(self, cells: Sequence[Cell]) -> list[Summary]:
        """For each cell, its repeats as one."""
        return summarised(cells, [[result for result in self.runs if result.is_in(cell)] for cell in cells])

    def save(self, cells: Sequence[Cell]) -> None:
        """Write the file: it is there as a whole or as it was before."""
        found = {
            "format": FORMAT,
            "arguments": self._arguments,
            "fixed": self._fixed,
            "cells": [summary.to_plain() for summary in self.summaries(cells)],
            "runs": [asdict(result) for result in self.runs],
        }
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(found, indent=1) + "\n")
        part.replace(self._path)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for name in sorted({*before, *now}):
        first, second = before.get(name), now.get(name)
        if isinstance(first, Mapping) and isinstance(second, Mapping):
            found += [f"{name}.{each}" for each in _differences(first, second)]
        elif first != second:
            found.append(f"{name}: {first} before, {second} now")
    return found


def _unreadable(path: Path, error: object) -> str:
    return f"{path} is no result of bench that can be continued ({error}); give another --output, or remove it"


def _of_another(path: Path, others: Sequence[str]) -> str:
    return (
        f"{path} has results that cannot stand in one table with these ({'; '.join(others)}); give another --output, "
        "or the same command"
    )
