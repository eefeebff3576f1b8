"""Time between points of a training, without waiting for the device: host time on the CPU, events on an accelerator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

_KEPT = 256
"""Events that are kept for the next points, once they have been read."""


class Clock(Protocol):
    """Marks points in time, and tells the time between two of them when both are over."""

    runs_behind: bool
    """Whether marks may be over only later, as a device works while the host goes on."""

    def mark(self) -> Any:
        """A point: now on the host, or when the device has done what it was given so far."""

    def is_over(self, mark: Any) -> bool:
        """Whether the device has come to `mark`."""

    def wait(self, mark: Any) -> None:
        """Wait until it has."""

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two marks that are over."""

    def release(self, marks: Sequence[Any]) -> None:
        """Take `marks` back, for later points."""


class HostClock:
    """The clock of a device that computes while the host waits for it, as the CPU does."""

    runs_behind = False

    def mark(self) -> float:
        """Seconds of the host."""
        return time.perf_counter()

    def is_over(self, mark: float) -> bool:
        """Always."""
        return True

    def wait(self, mark: float) -> None:
        """Do nothing."""

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start

    def release(self, marks: Sequence[float]) -> None:
        """Do nothing."""


class DeviceClock:
    """Events on the current stream of an accelerator, taken from a pool; nothing waits for them but `wait`.

    Args:
        device: The device of this rank.
    """

    runs_behind = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: list[Any] = []

    def mark(self) -> Any:
        """An event behind all that the stream was given so far."""
        event = self._pool.pop() if self._pool else torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    def is_over(self, mark: Any) -> bool:
        """Ask, and do not wait."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Wait for the device, which is only for the end of a training."""
        mark.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Time on the device."""
        return float(start.elapsed_time(end)) / 1000

    def release(self, marks: Sequence[Any]) -> None:
        """Keep the events for later points."""
        self._pool += marks[: max(0, _KEPT - len(self._pool))]


def build_clock(device: torch.device) -> Clock:
    """The clock of `device`."""
    return HostClock() if device.type in ("cpu", "mps") else DeviceClock(device)


@dataclass
class Phases:
    """A stretch of training as a sequence of phases; each lasts until the next one begins.

    Args:
        clock: The clock.
    """

    clock: Clock
    _names: list[str] = field(default_factory=list)
    _marks: list[Any] = field(default_factory=list)

    def enter(self, name: str) -> None:
        """Begin a phase, and end the one before.

        Args:
            name: Its name; empty for what does not count.
        """
        self._names.append(name)
        self._marks.append(self.clock.mark())

    @property
    def name(self) -> str:
        """The phase that goes on."""
        return self._names[-1]

    def cut(self, *, without: str = "") -> Phases:
        """Begin anew in the phase that goes on; what was before comes back as a stretch of its own, which has ended.

        Args:
            without: A phase that is left out of that stretch if it is the last.
        """
        if without and self.name == without:
            before = Phases(self.clock, self._names[:-1], self._marks)
        else:
            before = Phases(self.clock, self._names, [*self._marks, self.clock.mark()])
        self._names, self._marks = [self.name], [before._marks[-1]]
        return before

    def is_over(self) -> bool:
        """Whether the device has come to its end."""
        return self.clock.is_over(self._marks[-1])

    def seconds(self, *, waits: bool = False) -> dict[str, float]:
        """Phase -> its seconds, those without a name left out; of a stretch that `cut` has given, once.

        Args:
            waits: Whether to wait for the device first.
        """
        if waits:
            self.clock.wait(self._marks[-1])
        found: dict[str, float] = {}
        for name, start, end in zip(self._names, self._marks, self._marks[1:], strict=False):
            if name:
                found[name] = found.get(name, 0.0) + self.clock.seconds(start, end)
        self.clock.release(self._marks[:-1])  # the last one is the first of the next stretch
        return found
