"""Fits that a signal ends, for the ranks of a pool."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_parallel.strategies import stops
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for


class Stop(NamedTuple):
    """How a fit has ended.

    Args:
        status: Its exit status; -1 if no signal has ended it.
        step: Updates.
        path: Of the checkpoint that was written last.
        num_threads: Threads that are left of what listens.
    """

    status: int
    step: int
    path: str
    num_threads: int


class Signals(Callback):
    """Sends a signal to this process, or to several, a while after training has begun, wherever it stands."""

    def __init__(self, after: float, signum: int = signal.SIGTERM, to: Sequence[int] = ()) -> None:
        self._sends = threading.Timer(after, self._send, (signum, to or [os.getpid()]))
        self._sends.daemon = True

    @staticmethod
    def _send(signum: int, to: Sequence[int]) -> None:
        for process in to:
            os.kill(process, signum)

    def on_train_start(self, *args: Any) -> None:
        self._sends.start()

    def cancel(self) -> None:
        """Send nothing any more: a signal to another rank may have ended the fit before, and nobody heeds one then."""
        self._sends.cancel()


class Slow(DeepTied):
    """Steps of some milliseconds, so that a signal comes in the middle of one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.005)
        return super().training_step(batch, batch_idx)


def module() -> L.LightningModule:
    L.seed_everything(3, verbose=False)
    return Slow()


def stopped(strategy: str, folder: Path, signalled: list[int], *, steps: int = 400, **kwargs: Any) -> Stop:
    """A fit whose ranks `signalled` have SIGTERM."""
    rank = int(os.environ["LOCAL_RANK"])
    callback = ModelCheckpoint(folder)
    signals = [Signals(random.uniform(0.01, 0.3))] if rank in signalled else []
    trainer = trainer_for(strategy, 2, callbacks=[callback, *signals], enable_checkpointing=True, **kwargs)
    status = -1
    with mock.patch.object(stops, "POLL", 0.05):
        try:
            trainer.fit(module(), loader(num_readers(strategy, 2), steps))
        except SIGTERMException as end:
            status = int(end.code or 0)
        finally:
            for each in signals:
                each.cancel()
    listening = [thread for thread in threading.enumerate() if thread.name.startswith("rank-")]
    return Stop(status, trainer.global_step, callback.last_model_path, len(listening))


def stopped_often(strategy: str, folder: Path, times: int) -> list[Stop]:
    return [stopped(strategy, folder / str(each), [0, 1]) for each in range(times)]


def resumed(strategy: str, folder: Path, num_ranks: int, steps: int) -> int:
    """Go on from the last checkpoint; the updates there are in the end."""
    trainer = trainer_for(
        strategy, num_ranks, callbacks=[ModelCheckpoint(folder)], enable_checkpointing=True, max_steps=steps
    )
    trainer.fit(module(), loader(num_readers(strategy, num_ranks), 400), ckpt_path="last")
    return trainer.global_step
