"""Five lines at the end of a fit: its time, samples a second, memory, where the time went, and the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lightning_parallel.ranks.memory import MemoryUse

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

GIB = 2**30


@dataclass(frozen=True)
class Fit:
    """A fit as a whole, with what is not timed.

    Args:
        seconds: From its start to its end.
        updates: Their number.
        num_devices: The devices of all ranks.
    """

    seconds: float
    updates: int
    num_devices: int

    def __str__(self) -> str:
        updates = f"{self.updates} update{'s' if self.updates != 1 else ''}"
        devices = f"{self.num_devices} device{'s' if self.num_devices != 1 else ''}"
        return f"fit took {_duration(self.seconds)} for {updates} on {devices}"


@dataclass
class FitTotals:
    """Sums over the timed updates of a fit.

    Args:
        updates: Their number.
        samples: On which they have trained, over all ranks; not a number where batches do not show it.
        seconds: Phase -> its time, in the mean over ranks.
        memory: The most so far.
    """

    updates: int = 0
    samples: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    memory: MemoryUse = field(default_factory=lambda: MemoryUse(math.nan))

    def add(self, updates: int, samples: float, seconds: Mapping[str, float], memory: MemoryUse) -> None:
        """Add those of a window.

        Args:
            updates: Their number.
            samples: Over all ranks.
            seconds: Phase -> the time of an update.
            memory: Up to its end.
        """
        self.updates += updates
        self.samples += samples
        self.memory = memory
        for name, each in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + updates * each

    def summary(self, fit: Fit, checkpoint: str) -> str:
        """The five lines.

        Args:
            fit: What it was as a whole.
            checkpoint: The path of its checkpoint; empty without one.
        """
        lines = [
            str(fit),
            f"samples: {self._rates()}",
            f"memory: {self._memory()}",
            f"time: {self._shares()}",
            f"checkpoint: {checkpoint or 'none'}",
        ]
        return "\n  ".join(lines)

    def _rates(self) -> str:
        seconds = sum(self.seconds.values())
        if not seconds > 0:
            return "not timed; the first update never is"
        rate = "their number is not known" if math.isnan(self.samples) else f"{self.samples / seconds:.4g} a second"
        return f"{rate}, {seconds / self.updates:.3g} s an update"

    def _memory(self) -> str:
        if math.isnan(self.memory.peak):
            return "not read"
        if math.isnan(self.memory.reserved):
            return f"at most {self.memory.peak / GIB:.3g} GiB in a process"
        return (
            f"at most {self.memory.peak / GIB:.3g} GiB allocated and {self.memory.reserved / GIB:.3g} GiB reserved on "
            f"a device, {self.memory.retries:.0f} retries"
        )

    def _shares(self) -> str:
        total = sum(self.seconds.values())
        if not total > 0:
            return "not timed; the first update never is"
        largest = sorted(self.seconds.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {seconds / total:.1%}" for name, seconds in largest if seconds > 0)


def last_checkpoint(trainer: Trainer) -> str:
    """The path of the best checkpoint, or of the last one, that a callback of `trainer` has written; empty for none."""
    for callback in trainer.checkpoint_callbacks:
        for name in ("best_model_path", "last_model_path"):
            if path := getattr(callback, name, ""):
                return str(path)
    return ""


def _duration(seconds: float) -> str:
    """Seconds in words, such as ``"1 h 2 min 3 s"``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{f'{hours} h ' if hours else ''}{minutes} min {rest} s"
