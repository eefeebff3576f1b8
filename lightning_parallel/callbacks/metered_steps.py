"""The parts of training steps, timed for every callback that looks at them."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.batch_geometry import num_samples
from lightning_parallel.callbacks.breakdown_windows import ALONE, PhaseWindow, Straggler, straggler
from lightning_parallel.callbacks.meter_windows import MeteredRanks
from lightning_parallel.callbacks.step_clock import build_clock
from lightning_parallel.callbacks.step_phases import StepPhases, TimedActions
from lightning_parallel.callbacks.strategy_protocol import cuts_batches, has_whole_replicas, waiting_phases
from lightning_parallel.ranks.memory import MemoryUse

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


@dataclass(frozen=True)
class MeteredWindow:
    """Updates of all ranks, whose time is over.

    Args:
        at: The step under which they are logged.
        steps: The updates.
        rows: Of each rank, phase -> the seconds of an update; and `ALONE`, which is part of backward.
        samples: On which they have trained, over all ranks; not a number where batches do not show it.
        memory: The most of any rank, so far.
    """

    at: int
    steps: int
    rows: list[dict[str, float]]
    samples: float
    memory: MemoryUse

    @property
    def seconds(self) -> dict[str, float]:
        """Phase -> the seconds of an update, in the mean over ranks."""
        return {name: sum(row[name] for row in self.rows) / len(self.rows) for name in self.rows[0] if name != ALONE}

    @property
    def step(self) -> float:
        """Seconds of an update."""
        return sum(self.seconds.values())


Heard = Callable[["Trainer", MeteredWindow], None]


class MeteredSteps(Callback):
    """Times the phases of steps, and hears the windows of `every` updates. The first update is left out.

    Args:
        every: Updates of a window.
    """

    def __init__(self, every: int) -> None:
        self.listeners: list[Heard] = []
        """Called with each window after `on_window`; on all ranks, at the same step, in time that does not count."""
        self._every = every
        self._actions: TimedActions | None = None

    @abstractmethod
    def on_window(self, trainer: Trainer, window: MeteredWindow) -> None:
        """Hear a window. Called on all ranks, in time that does not count."""

    def times(self, trainer: Trainer) -> bool:
        """Whether it times by itself, and does not hear another one."""
        return True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.times(trainer):
            return
        self._device = trainer.strategy.root_device
        self._ranks = MeteredRanks.of(trainer)
        clock = build_clock(self._device)
        self._num_open = 1 if clock.runs_behind else 0
        self._phases = StepPhases(clock, joins=cuts_batches(trainer))
        self._window, self._closed, self._is_timed = PhaseWindow(), list[PhaseWindow](), False
        self._actions = TimedActions(trainer, self._phases)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._actions is not None:
            self._phases.end_all()

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if self._actions is not None:
            self._phases.begin("backward")

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._actions is not None:
            self._phases.end("backward")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._actions is None:
            return
        stretch = self._phases.cut()
        is_accumulating = _lightning.is_accumulating(trainer)
        if self._is_timed:
            self._window.add(stretch, num_samples(batch), is_held=is_accumulating)
        if not is_accumulating:
            self._window.steps += self._is_timed
            self._window.at = _lightning.logs.logged_step(trainer)
            self._is_timed = True
        for window in (*self._closed, self._window):
            window.read()
        if self._window.steps >= self._every:
            with self.stopped():
                self._close()
                self._tell_closed(trainer, self._num_open)

    def leave_out_update(self) -> None:
        """Let the next update count for nothing; call it between two updates, at the end of a window."""
        self._is_timed = False

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Let no time count inside of this context."""
        if self._actions is None:
            yield
            return
        self._phases.pause()
        try:
            yield
        finally:
            self._phases.resume()

    def _close(self) -> None:
        self._closed.append(self._window)
        self._window = PhaseWindow()

    def _tell_closed(self, trainer: Trainer, left: int) -> None:
        """Tell of closed windows but the last `left`, whose time the device may still be spending. A collective."""
        while len(self._closed) > left:
            window = self._closed.pop(0)
            names = [*self._phases.names, ALONE]
            own = [*window.seconds(names), window.samples, *MemoryUse.of(self._device).numbers]
            rows = self._ranks.of_all(own)
            times = [dict(zip(names, row, strict=False)) for row in rows]
            memory = MemoryUse.most([MemoryUse(*row[len(names) + 1 :]) for row in rows])
            samples = sum(row[len(names)] for row in rows) / self._ranks.num_sharing
            metered = MeteredWindow(window.at, window.steps, times, samples, memory)
            for heard in (self.on_window, *self.listeners):
                heard(trainer, metered)

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
        if self._actions is None:
            return
        if self._window.steps:
            self._close()
        self._tell_closed(trainer, 0)
        self._give_back(trainer)

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


def slow_rank(trainer: Trainer, window: MeteredWindow, slower: float) -> Straggler | None:
    """The rank for which others wait, by what it does by itself; as `straggler` says.

    Args:
        trainer: The trainer, whose strategy says when ranks wait for each other.
        window: The window.
        slower: By how much of the median it has to be slower.
    """
    if trainer.world_size == 1 or (waiting := waiting_phases(trainer)) is None:
        return None
    rows = [dict(row) for row in window.rows]
    for row in rows:
        alone = row.pop(ALONE)
        if has_whole_replicas(trainer):
            row[ALONE] = alone
            row["backward"] -= alone
    return straggler(rows, waiting, slower)
