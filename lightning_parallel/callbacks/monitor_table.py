"""A compact table of the figures of all ranks, which stays in place on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.errors import LiveError
from rich.live import Live
from rich.table import Table


def build_table(names: Sequence[str], rows: Sequence[Sequence[float]]) -> Table:
    """A row for each rank; figures that no rank has are left out.

    Args:
        names: Of the figures.
        rows: Of each rank, the figures.
    """
    shown = [place for place in range(len(names)) if any(row[place] == row[place] for row in rows)]
    table = Table("rank", *(names[place].replace("_", " ") for place in shown))
    for column in table.columns:
        column.justify = "right"
    for rank, row in enumerate(rows):
        table.add_row(str(rank), *(f"{row[place]:.4g}" if row[place] == row[place] else "" for place in shown))
    return table


class LiveTable:
    """A table that is shown again in its place; below the others where something else is live already.

    Args:
        console: Where it is shown.
    """

    def __init__(self, console: Console) -> None:
        self._console, self._is_alone = console, console.is_terminal
        self._live: Live | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of a trainer shows its own."""

    def show(self, table: Table) -> None:
        """Show `table` in place of the one before."""
        if self._is_alone and self._live is None:
            live = Live(
                console=self._console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
            )
            try:
                live.start()
                self._live = live
            except LiveError:  # Lightning's RichProgressBar, say, of which there may be one
                self._is_alone = False
        if self._live is None:
            self._console.print(table)
        else:
            self._live.update(table, refresh=True)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None
