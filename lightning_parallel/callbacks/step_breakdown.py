"""`StepBreakdown`: where the time of training steps goes, the rank for which others wait, and memory."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.batch_geometry import num_samples
from lightning_parallel.callbacks.breakdown_windows import ALONE, PhaseWindow, straggler
from lightning_parallel.callbacks.fit_summary import GIB, Fit, FitTotals, last_checkpoint
from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.meter_windows import MeteredRanks
from lightning_parallel.callbacks.step_clock import build_clock
from lightning_parallel.callbacks.step_phases import StepPhases, TimedActions
from lightning_parallel.callbacks.strategy_protocol import cuts_batches, has_whole_replicas, waiting_phases
from lightning_parallel.errors import check
from lightning_parallel.ranks.memory import MemoryUse

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class StepBreakdown(Callback):
    """Log the share of a step in which ranks wait for data, copy it, run forward and backward, and update; and memory.

    Shares of the time of all ranks, with ``breakdown/`` before them, add up to 1: ``data``, ``copy``, ``forward``,
    ``backward`` (under a pipeline, which runs them in turns, ``forward_backward``), ``optimizer``, ``checkpoint``, and
    ``other``: hooks, loggers and other callbacks. ``step_seconds`` is what they are shares of. Validation is none of
    it, and the first update is left out.

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
        self.latest: dict[str, float] = {}
        self._every, self._slower = every, slower
        self._log = MeterLog("StepBreakdown")
        self._actions: TimedActions | None = None
        self._num_updates = 0

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began, self._num_updates = time.perf_counter(), 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._device = trainer.strategy.root_device
        self._ranks = MeteredRanks.of(trainer)
        clock = build_clock(self._device)
        self._num_open = 1 if clock.runs_behind else 0
        self._phases = StepPhases(clock, joins=cuts_batches(trainer))
        self._window, self._closed, self._is_timed = PhaseWindow(), list[PhaseWindow](), False
        self._totals = FitTotals()
        self._named: set[tuple[int, str]] = set()
        self._actions = TimedActions(trainer, self._phases)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._phases.end_all()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._phases.begin("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phases.end("backward")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        stretch = self._phases.cut()
        is_accumulating = _lightning.is_accumulating(trainer)
        if self._is_timed:
            self._window.add(stretch, num_samples(batch), is_held=is_accumulating)
        if not is_accumulating:
            self._num_updates += 1
            self._window.steps += self._is_timed
            self._window.at = _lightning.logs.logged_step(trainer)
            self._is_timed = True
        for window in (*self._closed, self._window):
            window.read()
        if self._window.steps >= self._every:
            self._phases.pause()
            self._close()
            self._log_closed(trainer, self._num_open)
            self._phases.resume()

    def _close(self) -> None:
        self._closed.append(self._window)
        self._window = PhaseWindow()

    def _log_closed(self, trainer: Trainer, left: int) -> None:
        """Log closed windows but the last `left`, whose time the device may still be spending. A collective."""
        while len(self._closed) > left:
            window = self._closed.pop(0)
            names = self._phases.names
            own = [*window.seconds([*names, ALONE]), window.samples, *MemoryUse.of(self._device).numbers]
            rows = self._ranks.of_all(own)
            times = [dict(zip((*names, ALONE), row, strict=False)) for row in rows]
            memory = MemoryUse.most([MemoryUse(*row[len(names) + 2 :]) for row in rows])
            samples = sum(row[len(names) + 1] for row in rows) / self._ranks.num_sharing
            seconds = {name: sum(each[name] for each in times) / len(times) for name in names}
            self._totals.add(window.steps, samples, seconds, memory)
            self.latest = _values(seconds, memory)
            self._log.write(trainer, self.latest, window.at)
            self._name_slow(trainer, times)

    def _name_slow(self, trainer: Trainer, rows: list[dict[str, float]]) -> None:
        if trainer.world_size == 1 or (waiting := waiting_phases(trainer)) is None:
            return
        for row in rows:
            alone = row.pop(ALONE)
            if has_whole_replicas(trainer):
                row[ALONE] = alone
                row["backward"] -= alone
        found = straggler(rows, waiting, self._slower)
        if found is not None and (found.rank, found.phase) not in self._named:
            self._named.add((found.rank, found.phase))
            self._log.say(str(found))

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_fitting(trainer):
            self._phases.pause()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_fitting(trainer):
            self._phases.resume()

    def _is_fitting(self, trainer: Trainer) -> bool:
        return self._actions is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._window.steps:
            self._close()
        self._log_closed(trainer, 0)
        self._give_back(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._num_updates:
            fit = Fit(time.perf_counter() - self._began, self._num_updates, self._ranks.num_devices)
            self._log.say(self._totals.summary(fit, last_checkpoint(trainer)))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._give_back(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back(trainer)

    def _give_back(self, trainer: Trainer) -> None:
        if self._actions is not None:
            self._actions.give_back(trainer)
            self._actions = None


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
