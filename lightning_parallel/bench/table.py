"""Summaries as a table, on the terminal and in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from lightning_parallel.bench.cells import BASE, STRONG, Cell
from lightning_parallel.bench.collectives import num_bytes, num_calls
from lightning_parallel.bench.processes import RAN, REFUSED
from lightning_parallel.bench.summary import Summary

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "",
    "ms a step",
    "fastest to slowest",
    "samples/s",
    "tokens/s",
    "MiB",
    "collectives",
    "MiB sent",
    "efficiency",
)
_WIDTH, _WIDEST = 118, 400
"""Of notes, and of a table whose names have many options."""
_MIB = 2**20
_LARGE = 100
_NOTED = "({})"


def groups_of(summaries: Sequence[Summary]) -> list[tuple[str, list[Summary]]]:
    """The summaries that are to be compared with each other, with a title each."""
    pairs = groupby(summaries, key=lambda each: (each.cell.devices, each.cell.scaling))
    found = [list(own) for _, own in pairs]
    return [(_title(own), own) for own in found]


def _title(summaries: Sequence[Summary]) -> str:
    cell = summaries[0].cell
    samples = next((each.samples for each in summaries if each.samples), None)
    size = f", {samples} samples a step" if samples else ""
    return f"{devices_of(cell)}{scaling_of(cell)}{size}"


def devices_of(cell: Cell) -> str:
    """Such as ``"2 devices"``."""
    return f"{cell.devices} device{'s' if cell.devices > 1 else ''}"


def scaling_of(cell: Cell) -> str:
    """Such as ``", the same global batch (strong scaling)"``; nothing on the smallest number of devices."""
    if cell.scaling == BASE:
        return ""
    is_strong = cell.scaling == STRONG
    return ", the same global batch (strong scaling)" if is_strong else ", the same batch a device (weak scaling)"


class Notes:
    """Reasons, each with a number."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def number(self, reason: str) -> str:
        """The number of a reason, in parentheses; it is new or has been given before."""
        text = " ".join(reason.split())
        if text not in self.texts:
            self.texts.append(text)
        return _NOTED.format(self.texts.index(text) + 1)

    def lines(self) -> list[str]:
        """All of them."""
        return [f"{_NOTED.format(number)} {text}" for number, text in enumerate(self.texts, start=1)]


def line_of(summary: Summary, notes: Notes) -> list[str]:
    """The cells of one line, as texts; why there is nothing to show goes to `notes`."""
    name = summary.cell.row
    if summary.outcome != RAN:
        word = {REFUSED: "refused", "": "not run"}.get(summary.outcome, "ended")
        return [name, f"{word} {notes.number(summary.reason)}" if summary.reason else word, *[""] * (len(COLUMNS) - 2)]
    assert summary.seconds is not None
    sent = summary.collectives
    uncounted = f"? {notes.number(summary.reason)}" if summary.reason else "?"
    return [
        name,
        f"{1000 * summary.seconds:.1f}",
        f"{1000 * (summary.fastest or 0):.1f} to {1000 * (summary.slowest or 0):.1f}",
        _rate(summary.samples_per_second),
        _rate(summary.tokens_per_second),
        f"{(summary.memory_bytes or 0) / _MIB:.0f}",
        uncounted if sent is None else f"{num_calls(sent)}",
        "" if sent is None else f"{num_bytes(sent) / _MIB:.2f}",
        "" if summary.efficiency is None else f"{summary.efficiency:.0%}",
    ]


def _rate(number: float | None) -> str:
    """With three digits at least; nothing for ``None``."""
    if number is None:
        return ""
    return f"{number:,.0f}" if number >= _LARGE else f"{number:.3g}"


def as_text(summaries: Sequence[Summary]) -> str:
    """The same columns for a terminal, as wide as its longest name needs."""
    from rich.console import Console

    notes = Notes()
    console = Console(width=_WIDEST, color_system=None, legacy_windows=False)
    longest = max((len(summary.cell.row) for summary in summaries), default=0)
    with console.capture() as captured:
        for title, own in groups_of(summaries):
            console.print(_table(title, own, notes, longest))
            console.print()
    lines = [line.rstrip() for line in captured.get().splitlines()]
    for line in notes.lines():
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="    ")
    return "\n".join(lines)


def _table(title: str, summaries: Sequence[Summary], notes: Notes, longest: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column(COLUMNS[0], min_width=longest, no_wrap=True)
    for name in COLUMNS[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for summary in summaries:
        table.add_row(*map(Text, line_of(summary, notes)))
    return table


def as_markdown(summaries: Sequence[Summary]) -> str:
    """The same for a page."""
    notes, lines = Notes(), []
    for title, own in groups_of(summaries):
        lines += [f"**{title}**", "", _joined(COLUMNS), _joined(["---", *["---:"] * (len(COLUMNS) - 1)])]
        lines += [_joined([f"`{name}`", *rest]) for name, *rest in (line_of(each, notes) for each in own)]
        lines.append("")
    for line in notes.lines():
        lines += [line, ""]
    return "\n".join(lines)


def _joined(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"
