"""`StepBreakdown`: where the time of training steps goes, the rank for which others wait, and memory."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.fit_summary import GIB, Fit, FitTotals, last_checkpoint
from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.metered_steps import MeteredSteps, MeteredWindow, slow_rank
from lightning_parallel.callbacks.strategy_protocol import replica_devices
from lightning_parallel.errors import check
from lightning_parallel.ranks.memory import MemoryUse

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StepBreakdown(MeteredSteps):
    """Log the share of a step in which ranks wait for data, copy it, run forward and backward, and update; and memory.

    Shares of the time of all ranks, with ``breakdown/`` before them, add up to 1: ``data``, ``copy``, ``forward``,
    ``backward``, ``optimizer``, ``checkpoint``, and ``other``: hooks, loggers and other callbacks. Under a pipeline,
    which runs them in turns, ``forward_backward`` is in place of two of them, and ``bubble`` is the time in which a
    stage waits for another one. ``step_seconds`` is what they are shares of. Validation is none of it, and the first
    update is left out.

    Ranks wait for each other, so that all steps take as long as those of the slowest rank. It is named in a line where
    it is slower by itself, in time in which it does not wait: in all but backward where each rank has the whole module,
    and in data, copies and the update where ranks gather it. Under a pipeline nobody is named.

    At the end of `fit`, five lines have its time, samples a second, memory, shares over all of it, and the path of the
    best or last checkpoint.

    Nothing waits for the device: on an accelerator, times are those between events, and values are logged one window
    later, under the step to which they belong.

    Args:
        every: Updates between two logs.
        slower: By how much of the median's own time a rank has to be slower to be named.

    Attributes:
        latest: The values that were logged last, by name.

    Raises:
        ConfigurationError: If arguments do not fit.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[StepBreakdown(every=20)])
    """

    def __init__(self, *, every: int = 50, slower: float = 0.2) -> None:
        check(_violations(every, slower))
        super().__init__(every)
        self.latest: dict[str, float] = {}
        self._slower = slower
        self._log = MeterLog("StepBreakdown")
        self._num_updates = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._num_updates = time.perf_counter(), 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._totals = FitTotals()
        self._named: set[tuple[int, str]] = set()
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_updates += not _lightning.is_accumulating(trainer)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_window(self, trainer: Trainer, window: MeteredWindow) -> None:
        self._totals.add(window.steps, window.samples, window.seconds, window.memory)
        self.latest = _values(window.seconds, window.memory)
        self._log.write(trainer, self.latest, window.at)
        found = slow_rank(trainer, window, self._slower)
        if found is not None and (found.rank, found.phase) not in self._named:
            self._named.add((found.rank, found.phase))
            self._log.say(str(found))

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._num_updates:
            num_devices = trainer.world_size * len(replica_devices(trainer))
            fit = Fit(time.perf_counter() - self._began, self._num_updates, num_devices)
            self._log.say(self._totals.summary(fit, last_checkpoint(trainer)))


def _values(seconds: dict[str, float], memory: MemoryUse) -> dict[str, float]:
    """The values to log, by name."""
    total = sum(seconds.values())
    found = {f"breakdown/{name}": each / total for name, each in seconds.items() if total > 0}
    found["breakdown/step_seconds"] = total
    found |= {"memory/peak_gib": memory.peak / GIB, "memory/reserved_gib": memory.reserved / GIB}
    found["memory/retries"] = memory.retries
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _violations(every: int, slower: float) -> list[str]:
    found = []
    if every < 1:
        found.append(f"StepBreakdown(every={every}) is no number of updates; give 1 or more")
    if not slower > 0:
        found.append(f"StepBreakdown(slower={slower}) is no part of the median's time; give more than 0, such as 0.2")
    return found
