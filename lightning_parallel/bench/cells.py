"""Cells of a bench, and the order in which they take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WEAK, STRONG, BASE = "weak", "strong", "base"
"""The same batch a device; the same global batch; the smallest number of devices, where both are the same."""
SCALINGS = {"weak": (WEAK,), "strong": (STRONG,), "both": (WEAK, STRONG)}


@dataclass(frozen=True)
class Cell:
    """One row on one number of devices.

    Args:
        row: The name of the row.
        devices: The number of devices.
        scaling: ``"weak"``, ``"strong"``, or ``"base"`` on the smallest number of devices.
        batches: The global batch, in batches of the recipe's loader.
    """

    row: str
    devices: int
    scaling: str
    batches: int

    @property
    def title(self) -> str:
        """One line for people."""
        scaling = "" if self.scaling == BASE else f", {self.scaling} scaling"
        return f"{self.row} on {self.devices} device{'s' if self.devices > 1 else ''}{scaling}"


@dataclass(frozen=True)
class Run:
    """One repeat of a cell: processes of its own.

    Args:
        cell: The cell.
        repeat: The number of the repeat, from 0.
    """

    cell: Cell
    repeat: int


def cells_of(rows: Sequence[str], devices: Sequence[int], scaling: str) -> list[Cell]:
    """All cells, those that are to be compared with each other side by side.

    Args:
        rows: Names of rows.
        devices: Numbers of devices.
        scaling: ``"weak"``, ``"strong"`` or ``"both"``.
    """
    smallest = min(devices)
    groups = [(smallest, BASE, smallest)]
    for number in sorted(set(devices) - {smallest}):
        groups += [(number, kind, number if kind == WEAK else smallest) for kind in SCALINGS[scaling]]
    return [Cell(row, number, kind, batches) for number, kind, batches in groups for row in rows]


def runs_in_turn(cells: Sequence[Cell], repeats: int) -> list[Run]:
    """Every cell once, then every cell again: what else the machine does falls on all of them.

    Within those of one number of devices, another row begins in each round.
    """
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.devices, cell.scaling), []).append(cell)
    order = []
    for repeat in range(repeats):
        for group in groups.values():
            first = repeat % len(group)
            order += [Run(cell, repeat) for cell in [*group[first:], *group[:first]]]
    return order
