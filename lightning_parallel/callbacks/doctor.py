"""`Doctor`: what holds a training up, in a line that a person can act on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.profilers import PyTorchProfiler
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.breakdown_windows import Straggler
from lightning_parallel.callbacks.exposed_time import UpdateProfile
from lightning_parallel.callbacks.gpu_monitor import GpuMonitor
from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.meter_windows import MeteredRanks
from lightning_parallel.callbacks.metered_steps import MeteredSteps, MeteredWindow, slow_rank
from lightning_parallel.callbacks.step_breakdown import StepBreakdown
from lightning_parallel.callbacks.step_phases import TimedActions
from lightning_parallel.callbacks.strategy_protocol import PlansModules, has_whole_replicas, num_local_processes
from lightning_parallel.callbacks.throughput import Throughput
from lightning_parallel.callbacks.verdicts import Evidence, Throttling, Verdict, most_throttled, verdict
from lightning_parallel.callbacks.worker_trials import default_counts, tune_workers
from lightning_parallel.errors import check

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_PROFILED = 10
"""Windows for which one measurement of communication holds."""
_MARGIN = 1.1
"""The part of what training takes that workers are to give, so that they stay ahead."""


class Doctor(MeteredSteps):
    """Say what holds the training up, after each window of updates: the evidence, what it costs, and what to do.

    One line for a window, about what costs most; none where nothing costs a tenth of an update. It names waiting for
    data, copies of batches, communication that nothing hides, a model that is too small for its ranks, a rank for
    which others wait, and, on an accelerator, an allocator that runs out of memory, and with a `GpuMonitor` a device
    that is throttled. With a `StepBreakdown` it hears the windows of that, and else times steps in the same way.

    Communication is measured with torch's profiler, on several ranks, in the update behind the first window and every
    tenth one, which does not count. Where training waits for data, the loader is tried once with other numbers of
    workers, for some seconds, on all ranks together; no number of the training changes.

    Args:
        every: Updates of a window.
        tries_workers: Whether loaders are tried.
        slower: By how much of the median's own time a rank has to be slower to be named.

    Attributes:
        verdicts: Those of each window in which there was one.
        said: The sentences in which they were said.
        exposed: Of each rank, the seconds of an update in which it communicated and did not compute, as measured last.

    Raises:
        ConfigurationError: If arguments do not fit.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[Doctor(every=100)])
    """

    def __init__(self, *, every: int = 50, tries_workers: bool = True, slower: float = 0.2) -> None:
        check(_violations(every, slower))
        super().__init__(every)
        self.verdicts: list[Verdict] = []
        self.said: list[str] = []
        self._tries_workers, self._slower = tries_workers, slower
        self._log = MeterLog("Doctor")
        self._leader: MeteredSteps = self
        self._begin()

    def _begin(self) -> None:
        """Forget an earlier fit."""
        self._waiting: MeteredWindow | None = None
        self._profile: UpdateProfile | None = None
        self.exposed: list[float] = []
        self._slow: Straggler | None = None
        self._num_windows, self._retries, self._trial = 0, 0.0, ""

    @override
    def times(self, trainer: Trainer) -> bool:
        return self._leader is self

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        self.verdicts, self.said = [], []
        self._leader = next((each for each in _callbacks(trainer) if isinstance(each, StepBreakdown)), self)
        super().on_train_start(trainer, pl_module)
        if self._leader is not self:
            self._leader.listeners.append(self.on_window)
        self._ranks = MeteredRanks.of(trainer)

    @override
    def on_window(self, trainer: Trainer, window: MeteredWindow) -> None:
        is_due = self._num_windows % _PROFILED == 0
        self._num_windows += 1
        if is_due and trainer.world_size > 1 and not _is_profiled(trainer):
            self._waiting = window
            self._leader.leave_out_update()
        else:
            self._conclude(trainer, window)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._waiting is not None and self._profile is None:
            self._profile = UpdateProfile(trainer.strategy.root_device)
            self._profile.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is not None and self._waiting is not None and not _lightning.is_accumulating(trainer):
            profile, window = self._profile, self._waiting
            self._profile = self._waiting = None
            with self._leader.stopped():
                self.exposed = [found for (found,) in self._ranks.of_all([profile.stop()])]
                self._conclude(trainer, window)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        window, self._waiting = self._waiting, None
        if window is not None:
            self._conclude(trainer, window)

    def _conclude(self, trainer: Trainer, window: MeteredWindow) -> None:
        """Say what `window` shows; all ranks come to the same."""
        retries = max(0.0, window.memory.retries - self._retries)  # none on the host, where it is not a number
        self._retries += retries
        loaders = [each for each in _loaders(trainer) if isinstance(each, DataLoader)]
        trained = [each for each in trainer.lightning_module.parameters() if each.requires_grad]
        found = Evidence(
            seconds=window.seconds,
            straggler=self._slow_rank(trainer, window),
            num_ranks=trainer.world_size,
            exposed=self.exposed,
            gradient_bytes=sum(each.numel() * each.element_size() for each in trained),
            retries=retries,
            copies_aside=bool(loaders) and all(each.pin_memory for each in loaders),
            throttling=_throttling(trainer),
        )
        said = verdict(found, on_communication=_on_communication(trainer))
        if said is None:
            return
        self.verdicts.append(said)
        trial = self._tried(trainer, window, loaders) if said.name == "data" else ""
        self.said.append(" ".join(filter(None, (f"{said}{_mfu(trainer)}.", trial))))
        self._log.say(self.said[-1])

    def _slow_rank(self, trainer: Trainer, window: MeteredWindow) -> Straggler | None:
        """The rank that was slow in the window before, too: a short spell is nothing to act on."""
        found, before = slow_rank(trainer, window, self._slower), self._slow
        self._slow = found
        return found if found is not None and before is not None and found.rank == before.rank else None

    def _tried(self, trainer: Trainer, window: MeteredWindow, loaders: list[Any]) -> str:
        """Words on what other numbers of workers give, tried once."""
        if self._trial or not self._tries_workers or len(loaders) != 1:
            return self._trial
        (loader,) = loaders
        counts = [each for each in default_counts(loader, num_local_processes(trainer)) if each > loader.num_workers]
        taken = trainer.accumulate_grad_batches / max(1e-9, window.step - window.seconds["data"])
        given = trainer.accumulate_grad_batches / window.step
        if not counts:
            self._trial = "There are no cores for more workers: let the data set do less, or do it beforehand."
            return self._trial
        try:
            trials = tune_workers(loader, counts=counts)
        except Exception as error:  # of a data set that cannot be in another process, say
            self._trial = f"More workers could not be tried: {type(error).__name__}: {error}"
            return self._trial
        number = trials.enough_for(_MARGIN * taken)
        helps = trials.rates[number] > _MARGIN * given
        advice = f"give num_workers={number}" if helps else "more do not help; let the data set do less, or beforehand"
        self._trial = f"Tried: {trials}; training has {given:.3g} and could take {taken:.3g}: {advice}."
        return self._trial

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()
        super().on_exception(trainer, pl_module, exception)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._leave()
        super().teardown(trainer, pl_module, stage)

    def _leave(self) -> None:
        """Hear nobody, and profile nothing."""
        profile, self._profile, self._waiting = self._profile, None, None
        if profile is not None:
            profile.stop()
        if self.on_window in self._leader.listeners:
            self._leader.listeners.remove(self.on_window)
        self._leader = self


def _loaders(trainer: Trainer) -> list[Any]:
    training = _lightning.training_loaders(trainer)
    return [] if training is None else list(training.flattened)


def _callbacks(trainer: Any) -> list[Any]:
    return list(trainer.callbacks)


def _is_profiled(trainer: Trainer) -> bool:
    """Whether the user has torch's profiler on, of which there is one."""
    own: Any = getattr(trainer, "profiler", None)
    while isinstance(own, TimedActions):
        own = own.own
    return isinstance(own, PyTorchProfiler)


def _throttling(trainer: Trainer) -> Throttling | None:
    """The device that is throttled for longest, where a `GpuMonitor` looks; the same on all ranks."""
    monitors = (each for each in _callbacks(trainer) if isinstance(each, GpuMonitor))
    return next((most_throttled(each.latest, trainer.world_size) for each in monitors), None)


def _mfu(trainer: Trainer) -> str:
    """The share of the device's peak, where a `Throughput` measures it."""
    for each in _callbacks(trainer):
        if isinstance(each, Throughput) and (mfu := each.latest.get("throughput/mfu")) is not None:
            return f" (MFU {mfu:.0%})"
    return ""


def _on_communication(trainer: Trainer) -> str:
    """Advice against communication under this strategy."""
    advice = ["a larger batch on each rank", "accumulate_grad_batches, with accumulation_sync='last'"]
    if has_whole_replicas(trainer):
        return _TAKE.format(", or ".join([*advice, "comm_hook='fp16' or 'bf16', which sends half of the bytes"]))
    if isinstance(trainer.strategy, PlansModules):
        degrees = trainer.strategy.degrees
        if degrees.pipeline != 1:
            return "Take more microbatches, for which stages wait less, or fewer stages"
        if degrees.tensor != 1 or degrees.context != 1:
            return "Take a smaller degree of tensor or context, within one machine, and shard over the rest"
    advice += ["precision='bf16-mixed', which gathers half of the bytes", "reshard='never', where memory allows it"]
    if trainer.num_nodes > 1:
        advice.append("hsdp_custom, which shards within each machine")
    return _TAKE.format(", or ".join(advice))


def _violations(every: int, slower: float) -> list[str]:
    found = []
    if every < 1:
        found.append(f"Doctor(every={every}) is no number of updates; give 1 or more")
    if not slower > 0:
        found.append(f"Doctor(slower={slower}) is no part of the median's time; give more than 0, such as 0.2")
    return found


_TAKE = "Take {}"
