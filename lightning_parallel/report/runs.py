"""Logged runs: what is in the files of Lightning's CSV and TensorBoard loggers."""

from __future__ import annotations

import csv
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_parallel.report.event_files import read_scalars

CSV_NAME = "metrics.csv"
_EVENTS = "events.out.tfevents."
_NO_METRICS = ("step", "epoch", "hp_metric")

Scalar = tuple[str, int, float]


@dataclass(frozen=True)
class Series:
    """The values of one name, in the order of their steps.

    Args:
        steps: The steps.
        values: As many values, which may be infinite or no number.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def finite(self) -> list[float]:
        """The values that are finite."""
        return [value for value in self.values if math.isfinite(value)]


@dataclass(frozen=True)
class Run:
    """A run.

    Args:
        name: What tells it from others.
        series: By name.
    """

    name: str
    series: dict[str, Series]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs below `folders`: each folder that has a file of a logger in it is one.

    Args:
        folders: Folders, as loggers have made them.
    """
    files: dict[Path, list[Path]] = defaultdict(list)
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if (path.name == CSV_NAME or path.name.startswith(_EVENTS)) and path.is_file():
                files[path.parent.resolve()].append(path)
    found = {folder: _series(_scalars(dict.fromkeys(paths))) for folder, paths in files.items()}
    found = {folder: series for folder, series in found.items() if series}
    return [Run(name, series) for name, series in zip(_names(list(found)), found.values(), strict=True)]


def _names(folders: Sequence[Path]) -> list[str]:
    """Short names of folders: what they do not have in common."""
    if len(folders) == 1:
        return [folders[0].name]
    common = Path(os.path.commonpath(folders)) if folders else Path()
    return [str(folder.relative_to(common)) if folder != common else folder.name for folder in folders]


def _scalars(paths: Iterable[Path]) -> Iterator[Scalar]:
    for path in paths:
        yield from _of_csv(path) if path.name == CSV_NAME else read_scalars(path)


def _of_csv(path: Path) -> Iterator[Scalar]:
    """The values of a file of `CSVLogger`; cells that are empty, or no numbers, are left out."""
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            step = _number(row.get("step"))
            if step is None or not math.isfinite(step):
                continue
            for name, cell in row.items():
                value = _number(cell)
                if isinstance(name, str) and value is not None:
                    yield name, int(step), value


def _number(cell: object) -> float | None:
    try:
        return float(cell) if isinstance(cell, str) else None
    except ValueError:
        return None


def _series(scalars: Iterable[Scalar]) -> dict[str, Series]:
    """Name -> its values by step; of several at one step, the last, as of a run that was resumed."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for name, step, value in scalars:
        if name not in _NO_METRICS:
            found[name][step] = value
    in_order = {name: sorted(values.items()) for name, values in found.items()}
    return {name: Series(*zip(*items, strict=True)) for name, items in sorted(in_order.items())}
