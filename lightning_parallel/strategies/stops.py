"""A signal to any rank ends all of them behind the same step, without a collective in the steps before."""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.errors import CheckpointError
from lightning_parallel.ranks.lock_step import said_by_all

if TYPE_CHECKING:
    import torch.distributed as dist
    from lightning.pytorch import Trainer

    from lightning_parallel.strategies.saving_strategy import SavingStrategy

STOP = -1
"""The wish of a rank that training ends, in the place of a signal."""
POLL = 1.0
"""Seconds between two looks for signals to other ranks."""
_SOON = 0.02
"""Seconds between two looks for what other ranks answer."""


@dataclass(frozen=True)
class _Decision:
    """The agreement of all ranks: the signal, and behind which step of the fit it is heeded."""

    signum: int
    step: int


class StopAgreement:
    """Lets all ranks of a fit heed a signal, or the wish of a rank to end, behind the same step.

    A thread of each rank hears of signals, promises that its rank begins no further step before all have answered, and
    says which step runs there now. The last of these steps is the one behind which all heed the signal: none is
    beyond it. Threads answer while the rank itself waits in a collective, so that a rank that keeps its promise is
    never one that others wait for. Between signals a step costs the comparison of two numbers. A rank that asks at the
    end of a step has begun no other: if all ask there, it is the last one.

    Args:
        key: Beginning of the names under which ranks of this run tell each other what they ask for.
        rank: This one.
        size: The number of ranks.
        store: What they tell each other in; ``None`` for a single rank.
        is_failing: Whether a rank has failed: the store may end then, and a look into it would print frames of C++.
    """

    def __init__(
        self, key: str, rank: int, size: int, store: dist.Store | None, is_failing: Callable[[], bool]
    ) -> None:
        self._key, self._rank, self._size, self._is_failing = key, rank, size, is_failing
        # The queue that a handler may put something into; `None` wakes the thread at the end.
        self._asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._num_ended = self._round = 0
        self._promised: int | None = None
        self._wish: int | None = None
        self._decision: _Decision | None = None
        self._has_changed = threading.Condition()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, args=(store,), daemon=True, name="rank-signals")
        self._thread.start()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a trainer, in a callback or another process, heeds no signals; queues and threads cannot be copied.
        return type(None), ()

    def ask(self, signum: int) -> None:
        """Ask all ranks to heed `signum`; may be called from the handler of a signal."""
        self._asked.put(signum)

    def end_step(self, wish: int | None = None) -> int | None:
        """Count a step that has ended.

        Args:
            wish: What this rank asks for here, before it begins another step; ``None`` for nothing.

        Returns:
            The signal, or wish of some rank, that is to be heeded now, if there is one.
        """
        with self._has_changed:
            self._num_ended += 1
            self._wish = wish
            if wish is not None:
                self._asked.put(wish)
            while self._is_bound and self._decision is None:
                self._has_changed.wait()
            self._wish, decision = None, self._decision
            if decision is None:
                return wish  # nobody else has another step to begin
            if self._num_ended < decision.step:
                return None
            self._promised = self._decision = None
            self._has_changed.notify_all()
            return decision.signum

    @property
    def _is_bound(self) -> bool:
        """Whether this rank may not begin another step before all have answered."""
        if self._is_over.is_set():
            return False
        return self._wish is not None or (self._promised is not None and self._num_ended >= self._promised)

    def close(self) -> None:
        """Heed no more signals: the last step has ended, or the run has failed."""
        self._is_over.set()
        self._asked.put(None)
        with self._has_changed:
            self._has_changed.notify_all()
        self._thread.join(POLL + 1)

    def _listen(self, store: dist.Store | None) -> None:
        try:
            while not self._is_over.is_set():
                with contextlib.suppress(queue.Empty):
                    asked = self._asked.get(timeout=POLL)
                    # Another rank's wish of the same step may have been heeded meanwhile.
                    if asked is not None and (asked != STOP or self._wish is not None):
                        self._agree(store, asked)
                    continue
                if store is not None and not self._is_failing() and store.check([self._name("asked")]):
                    self._agree(store, None)
            if store is not None and not self._is_failing():
                store.set(self._name("over"), "1")
        except RuntimeError:  # the store has ended with rank 0, which was done
            self._is_over.set()
            self._decide(None)

    def _agree(self, store: dist.Store | None, asked: int | None) -> None:
        """Agree on the step behind which to heed a signal, and wait until this rank has."""
        if store is not None:
            if asked is not None:
                store.compare_set(self._name("asked"), "", str(asked))  # another rank may have had another signal
            asked = int(store.get(self._name("asked")))
        assert asked is not None
        with self._has_changed:
            self._promised = last = self._num_ended + (self._wish is None)
        if store is not None:
            store.set(self._name(self._rank), str(last))
            names = [self._name(rank) for rank in range(self._size)]
            while not store.check(names):
                # A rank that is over has ended the last step there is, so that this one has no other to begin.
                if self._is_failing() or store.check([self._name("over")]) or self._is_over.wait(_SOON):
                    self._decide(None)
                    return
            last = max(int(store.get(name)) for name in names)
        self._decide(_Decision(asked, last))
        self._forget(asked)

    def _forget(self, signum: int) -> None:
        """Leave out what has asked for `signum` until it was heeded: a job's signal comes to each of its ranks."""
        others = []
        with contextlib.suppress(queue.Empty):
            while True:
                others.append(self._asked.get_nowait())
        for asked in others:
            if asked != signum:
                self._asked.put(asked)

    def _decide(self, decision: _Decision | None) -> None:
        with self._has_changed:
            self._decision = decision
            if decision is None:
                self._promised = self._wish = None
            self._has_changed.notify_all()
            while self._decision is not None and not self._is_over.is_set():
                self._has_changed.wait(POLL)
        self._round += 1

    def _name(self, what: str | int) -> str:
        return f"{self._key}/{self._round}/{what}"


class RunSignals(_lightning.signals.SignalConnector):
    """Takes the signals of a run: in a fit all ranks heed them behind the same step, elsewhere each does at once.

    Args:
        trainer: The trainer.
        stops: Of the fit; ``None`` where nothing is trained.
    """

    def __init__(self, trainer: Trainer, stops: StopAgreement | None) -> None:
        super().__init__(trainer)
        self._stops = stops

    @override
    def __getstate__(self) -> dict[str, Any]:
        # A copy of the trainer, in another process or for another fit, agrees with nobody; threads cannot be copied.
        return {**super().__getstate__(), "_stops": None}

    @override
    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        if self._stops is None:
            self.received_sigterm = True
            raise SIGTERMException
        self._stops.ask(int(signum))

    @override
    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        # Outside of a fit there is nothing to save; SLURM ends the run by its other signal.
        if self._stops is not None:
            self._stops.ask(int(signum))

    def end_step(self) -> None:
        """Heed a signal if it is time: leave the run, or save and queue its job again.

        Raises:
            SIGTERMException: On all ranks.
        """
        assert self._stops is not None
        signum = self._stops.end_step()
        if signum == signal.SIGTERM:
            self.received_sigterm = True
            raise SIGTERMException
        if signum is not None:
            # SLURM ends the job as soon as it is queued again.
            with cast("SavingStrategy", self.trainer.strategy).waiting_for_saves():
                super()._slurm_sigusr_handler_fn(signum, None)  # type: ignore[arg-type]


class StopWishes:
    """Ends training on all ranks behind the same batch, where some have set `trainer.should_stop` and others have not.

    A rank that decides by its own clock or loss would end alone, and the others would wait for it for ever.

    Args:
        trainer: Of the fit.
        stops: An agreement for this alone.
        group: All ranks, for host memory.
    """

    def __init__(self, trainer: Trainer, stops: StopAgreement, group: dist.ProcessGroup) -> None:
        self._trainer, self._stops, self._group = trainer, stops, group
        self._has_agreed = self._waits = False

    def meet(self) -> None:
        """Let all ranks stop behind a batch, or none. It costs something only where a rank wants to."""
        wants = self._trainer.should_stop
        if wants and self._has_agreed:
            return  # till the least number of epochs is done
        heeded = self._stops.end_step(STOP if wants else None) is not None
        self._waits = (self._waits or wants) and not heeded
        self._agree(heeded, wants)

    def meet_all(self) -> None:
        """Let all ranks stop at the end of an epoch, or none. A collective."""
        wants = self._trainer.should_stop or self._waits
        self._agree(any(said_by_all(int(wants), self._group)), wants)

    def _agree(self, stops: bool, wants: bool) -> None:
        self._trainer.should_stop = self._has_agreed = stops
        if stops and not wants:
            rank_zero_info("another rank has set trainer.should_stop: training ends on all ranks behind this batch")

    def close(self) -> None:
        """Ask nobody any more."""
        self._stops.close()


def save_last(trainer: Trainer) -> None:
    """Save what ``ckpt_path="last"`` finds, behind a step after which all ranks end, and say so. A collective.

    Args:
        trainer: With a `ModelCheckpoint` whose files have all that a run needs to go on; else nothing is saved.
    """
    whole = [
        each
        for each in trainer.checkpoint_callbacks
        if isinstance(each, ModelCheckpoint)
        and not each.save_weights_only
        and not getattr(trainer, "fast_dev_run", False)
    ]
    own = [each for each in whole if each.save_last] or whole[:1]
    saved = []
    for callback in own:
        path = _path_of_last(trainer, callback)
        try:
            trainer.save_checkpoint(path)
        except CheckpointError as error:
            rank_zero_warn(str(error))  # the run ends anyway, and its status says that it was stopped
        else:
            callback.last_model_path = path
            saved.append(path)
    then = f"saved {', '.join(saved)}, from which ckpt_path='last' goes on" if saved else _NOTHING_SAVED
    rank_zero_info(f"stopped by SIGTERM behind update {trainer.global_step}; {then}")


def _path_of_last(trainer: Trainer, callback: ModelCheckpoint) -> str:
    """Where `callback` writes its last checkpoint: over that of this run, beside those of others."""
    metrics = {
        **trainer.callback_metrics,
        "epoch": torch.tensor(trainer.current_epoch),
        "step": torch.tensor(trainer.global_step),
    }
    name, version = callback.CHECKPOINT_NAME_LAST, 0
    path = callback.format_checkpoint_name(metrics, name)
    while path != callback.last_model_path and callback.file_exists(path, trainer):
        version += 1
        path = callback.format_checkpoint_name(metrics, name, ver=version)
    return path


_NOTHING_SAVED = "nothing was saved, since no ModelCheckpoint that saves more than weights is among the callbacks"
