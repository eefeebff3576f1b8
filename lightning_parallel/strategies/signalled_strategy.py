"""Strategies whose ranks end together: after a signal behind the same step, after an error or a hang soon."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from lightning_parallel import _lightning, _torch
from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.strategies.exception_saves import ExceptionSaves
from lightning_parallel.strategies.hangs import HangWatch
from lightning_parallel.strategies.saving_strategy import SavingStrategy
from lightning_parallel.strategies.stops import RunSignals, StopAgreement, StopWishes, save_last

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class SignalledStrategy(SavingStrategy):
    """Takes SIGTERM, and the signal of SLURM before a time limit, in Lightning's place."""

    _stops: StopAgreement | None = None
    _wishes: StopWishes | None = None
    _stopping: Trainer | None = None
    _exception_saves: ExceptionSaves | None = None
    _hangs: HangWatch | None = None

    def watch_hangs(self, limit: float) -> None:
        """End ranks from now on that wait for each other for longer than that.

        Args:
            limit: Seconds; 0 to watch nobody.
        """
        if limit and self.world_size > 1:
            self._hangs = HangWatch(self.module, self._failures, self.global_rank, self.world_size, limit=limit)

    def take_signals(self, trainer: Trainer) -> None:
        """Heed signals to the run of `trainer` from now on: a fit all ranks leave behind the same step. A collective.

        Args:
            trainer: Its handlers are set once the strategy has been set up.
        """
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            store = None if self.world_size == 1 else _torch.groups.connected_store()
            ranks = self.global_rank, self.world_size
            key, has_failed = self._failures.key, lambda: self._failures.has_heard
            self._stops = StopAgreement(f"{key}/signal", *ranks, store, has_failed)
            if store is not None:
                stops = StopAgreement(f"{key}/stop", *ranks, store, has_failed)
                self._wishes = StopWishes(trainer, stops, build_host_group(self.root_device.type))
            self._stopping = trainer
            if store is not None:
                self._exception_saves = ExceptionSaves(trainer, self._failures.key, *ranks, store, self.place_in_step)
        signals = RunSignals(trainer, self._stops if is_fitting else None)
        _lightning.signals.set_connector(trainer, signals)
        if is_fitting:
            meet = () if self._wishes is None else (self._wishes.meet, self._wishes.meet_all)
            _lightning.signals.set_end_of_step(trainer, signals.end_step, *meet)

    @override
    def on_exception(self, exception: BaseException) -> None:
        if not isinstance(exception, SIGTERMException):
            self._failures.report(exception)
            return
        exception.code = self._saving.stop_status
        _lightning.signals.leave_children()
        if self._stopping is not None:
            with self.waiting_for_saves():
                save_last(self._stopping)

    def place_in_step(self) -> str:
        """Where in a step this rank is: ranks whose collectives so far are the same return the same."""
        return ""

    def end_watching(self) -> None:
        """Heed no more signals, and watch the other ranks no more."""
        if self._hangs is not None:
            self._hangs.stop()
            self._hangs = None
        if self._exception_saves is not None:
            self._exception_saves.close()
            self._exception_saves = None
        if self._stops is not None:
            self._stops.close()
            self._stops = None
        if self._wishes is not None:
            self._wishes.close()
            self._wishes = None
        if self._stopping is not None:
            _lightning.signals.set_end_of_step(self._stopping, None)
            self._stopping = None
        self._failures.stop()
