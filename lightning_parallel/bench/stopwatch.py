"""Steps are timed, after a warm-up; then, in steps that are not timed, their collectives are counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.data import extract_batch_size
from torch import accelerator

from lightning_parallel.bench.collectives import CollectiveCount, num_calls
from lightning_parallel.callbacks.batch_geometry import num_tokens
from lightning_parallel.ranks.memory import peak_memory, reset_peak_memory

_COUNTED = 2
"""Steps in which collectives are counted. In a few of them (the first ones, and those whose number is a power of two)
strategies look for what is rare; of two in a row, one is plain."""


@dataclass(frozen=True)
class Timing:
    """The steps of a run.

    Args:
        warm_up: Steps before the first that is timed.
        steps: Steps that are timed, in one go.
    """

    warm_up: int
    steps: int

    @property
    def total(self) -> int:
        """All steps of a run."""
        return self.warm_up + self.steps + _COUNTED


@dataclass(frozen=True)
class Measured:
    """The measurements of one rank in one run.

    Args:
        seconds: Of a step, from the start of its first batch to that of the next step's.
        samples: Of a step, over all ranks.
        tokens: Of a step, over all ranks; ``None`` where batches have none.
        memory: The most bytes that the rank had in a timed step, over what it had before the module was built.
        is_memory_of_steps: Whether that peak is one of the timed steps, and not of the whole run.
        collectives: Kind -> the number of calls in a step, and their bytes; ``None`` where they were not counted.
    """

    seconds: float
    samples: int
    tokens: int | None
    memory: int
    is_memory_of_steps: bool
    collectives: Mapping[str, tuple[int, int]] | None = None

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Stopwatch:
    """Is told where each step begins, and measures. Memory counts from the moment at which it is made.

    Args:
        timing: The steps.
        on_timed: Called with the measurements when all timed steps are over, before others are taken.

    Attributes:
        device: The device of this rank; to be set before the first step.
        measured: The result, once all timed steps are over; complete when `begin_step` has returned False.
    """

    def __init__(self, timing: Timing, on_timed: Callable[[Measured], None]) -> None:
        self.device = torch.device("cpu")
        self.measured: Measured | None = None
        self._timing, self._on_timed = timing, on_timed
        reset_peak_memory(self.device)
        self._host_before = peak_memory(self.device)
        self._number = 0
        self._is_reset = False
        self._start = 0.0
        self._count: CollectiveCount | None = None
        self._counts: list[dict[str, tuple[int, int]]] = []

    def begin_step(self, batch: Any, together: int) -> bool:
        """Note that a step begins.

        Args:
            batch: The first batch of the step, of this rank.
            together: The number of batches of a step, over all ranks.

        Returns:
            Whether steps are left to be taken.
        """
        number, timed = self._number, self._timing.warm_up + self._timing.steps
        self._number += 1
        if number == self._timing.warm_up:
            self._is_reset = reset_peak_memory(self.device)
            self._synchronize()
            self._start = time.perf_counter()
        elif number == timed:
            self._synchronize()
            seconds = (time.perf_counter() - self._start) / self._timing.steps
            before = self._host_before if self.device.type == "cpu" else 0
            memory = max(0, peak_memory(self.device) - before)
            samples = extract_batch_size(batch)
            tokens = num_tokens(batch, samples)
            of_step = None if tokens is None else tokens * together
            self.measured = Measured(seconds, samples * together, of_step, memory, self._is_reset)
            self._on_timed(self.measured)
        if number >= timed:
            self._end_count()
        if number >= self._timing.total:
            assert self.measured is not None
            least = min(self._counts, key=num_calls)
            self.measured = Measured(**{**vars(self.measured), "collectives": least})
            return False
        if number >= timed:
            self._count = CollectiveCount()
            self._count.__enter__()
        return True

    def close(self) -> None:
        """End what is open, after an error."""
        self._end_count()

    def _end_count(self) -> None:
        if self._count is not None:
            self._count.__exit__(None, None, None)
            self._counts.append(self._count.found)
            self._count = None

    def _synchronize(self) -> None:
        if self.device.type != "cpu":
            accelerator.synchronize(self.device)
