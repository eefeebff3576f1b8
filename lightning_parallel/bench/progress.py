"""A line that says what runs, and how long the rest will take."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Self, TextIO

from lightning_parallel.bench.cells import Run

_MINUTE = 60.0


class Progress:
    """One line for each run; on a terminal, each in the place of the one before.

    Args:
        repeats: The number of repeats.
        stream: Where lines go; standard error by default.
    """

    def __init__(self, repeats: int, stream: TextIO | None = None) -> None:
        self._repeats = repeats
        self._stream = stream or sys.stderr
        self._seconds: dict[tuple[str, int], float] = {}
        self._is_first = True
        self._start = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        self._write("")

    def begin(self, run: Run, number: int, left: Sequence[Run]) -> None:
        """Say that a run begins.

        Args:
            run: The run.
            number: Its place among all, from 0.
            left: What is still to be run, this one included.
        """
        seconds = self.seconds_left(left)
        about = "" if seconds is None else f"; {in_words(seconds)} left"
        repeat = f"repeat {run.repeat + 1} of {self._repeats}"
        self._write(f"[{number + 1}/{number + len(left)}] {run.cell.title}, {repeat}{about}")
        self._start = time.monotonic()

    def end(self, run: Run) -> None:
        """Note that a run has ended. The first one tells little: what ranks are forked from has started with it."""
        if not self._is_first:
            self._seconds[run.cell.row, run.cell.devices] = time.monotonic() - self._start
        self._is_first = False

    def seconds_left(self, runs: Sequence[Run]) -> float | None:
        """The time that `runs` will take, by those of the same row or else by all so far; ``None`` before any."""
        if not self._seconds:
            return None
        mean = sum(self._seconds.values()) / len(self._seconds)
        return sum(self._seconds.get((run.cell.row, run.cell.devices), mean) for run in runs)

    def _write(self, line: str) -> None:
        if self._stream.isatty():
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
        elif line:
            print(line, file=self._stream, flush=True)


def in_words(seconds: float) -> str:
    """Such as ``"about 3 min"``."""
    return f"about {seconds:.0f} s" if seconds < 2 * _MINUTE else f"about {seconds / _MINUTE:.0f} min"
