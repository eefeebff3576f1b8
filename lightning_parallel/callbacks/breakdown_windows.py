"""Seconds of phases between two logs, on every rank, and the rank that is slow."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_parallel.callbacks.step_clock import Phases

VISIBLE = 0.05
"""The part of a step by which a rank has to be late before it is named: less is not worth a look."""

ALONE = "backward without reduction"
"""The part of backward in microsteps that reduce no gradients, where each rank has the whole module."""


@dataclass
class PhaseWindow:
    """Updates between two logs, whose time is read step by step, as soon as it is over.

    Args:
        at: The step under which they are logged.
        steps: The updates.
        samples: On which this rank has trained.
        alone: Seconds of backward in microsteps behind which the window of accumulation is still open.
    """

    at: int = 0
    steps: int = 0
    samples: float = 0.0
    alone: float = 0.0
    _seconds: dict[str, float] = field(default_factory=dict)
    _stretches: deque[tuple[Phases, bool]] = field(default_factory=deque)

    def add(self, stretch: Phases, samples: float, *, is_held: bool) -> None:
        """Add a microstep.

        Args:
            stretch: Its time.
            samples: Its samples.
            is_held: Whether its gradients are not reduced yet.
        """
        self._stretches.append((stretch, is_held))
        self.samples += samples

    def read(self, *, waits: bool = False) -> None:
        """Read the time that is over.

        Args:
            waits: Whether to wait for the device until all of it is.
        """
        while self._stretches and (waits or self._stretches[0][0].is_over()):
            stretch, is_held = self._stretches.popleft()
            found = stretch.seconds(waits=waits)
            self.alone += found.get("backward", 0.0) * is_held
            for name, seconds in found.items():
                self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, names: Sequence[str]) -> list[float]:
        """Seconds of an update in each of `names`, phases or `ALONE`; waits for the device where it is not done."""
        self.read(waits=True)
        return [(self.alone if name == ALONE else self._seconds.get(name, 0.0)) / max(1, self.steps) for name in names]


@dataclass(frozen=True)
class Straggler:
    """A rank for which others wait.

    Args:
        rank: Its number.
        phase: Where it is slower, for the most part.
        seconds: Of an update, by itself, without waiting for others.
        median: The same of the rank in the middle.
    """

    rank: int
    phase: str
    seconds: float
    median: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} is slow: by itself it takes {1000 * self.seconds:.3g} ms of a step, and ranks in the "
            f"median {1000 * self.median:.3g} ms; most of the difference is in {self.phase}"
        )


def straggler(rows: Sequence[Mapping[str, float]], waiting: Collection[str], slower: float) -> Straggler | None:
    """The slowest rank, if it is slower than the median by a factor, and late by a visible part of a step.

    What counts is time in which a rank does not wait for others. Where it does wait in what counts, all ranks take as
    long as the slowest one, so that a slow rank may be missed, and no other one is named.

    Args:
        rows: Of each rank, phase -> the seconds of an update.
        waiting: Phases in which ranks wait for each other, which do not count.
        slower: By how much of the median it has to be slower.

    Example:
        >>> straggler([{"data": 0.1, "backward": 0.5}, {"data": 0.4, "backward": 0.2}], ["backward"], 0.2).rank
        1
    """
    own = [{name: seconds for name, seconds in row.items() if name not in waiting} for row in rows]
    totals = [sum(row.values()) for row in own]
    median = statistics.median_low(totals)
    slowest = max(range(len(rows)), key=totals.__getitem__)
    late, step = totals[slowest] - median, statistics.median(sum(row.values()) for row in rows)
    if late <= slower * median or late < VISIBLE * step or math.isnan(late):
        return None
    usual = {name: statistics.median_low(row[name] for row in own) for name in own[slowest]}
    phase = max(usual, key=lambda name: own[slowest][name] - usual[name])
    return Straggler(slowest, phase, totals[slowest], median)
