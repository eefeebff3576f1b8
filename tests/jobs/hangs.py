"""Fits in which ranks wait for others that do not come, for the ranks of a pool and as a script."""

from __future__ import annotations

import copy
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import lightning as L
import torch

from lightning_parallel.strategies import hangs
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

LIMIT = 2.0
"""Seconds for which a rank may be still in these fits."""
AT = 2
"""The batch of the hang."""


class Ending(NamedTuple):
    """What a fit that has not been ended leaves.

    Args:
        step: Updates.
        said: What was written about ranks that stand still.
        num_copied: Copies of the watch, each of which would be a second one.
        num_threads: Threads that still watch.
    """

    step: int
    said: list[str]
    num_copied: int
    num_threads: int


class Hangs(DeepTied):
    """Does on some ranks only what all have to do."""

    num_copied = 0

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == AT and self.global_rank == 0:
            if self.case == "gather":
                self.all_gather(torch.ones(3))
            elif self.case == "barrier":
                self.trainer.strategy.barrier()
        if self.case == "all slow":
            time.sleep(1.4 * LIMIT if batch_idx == AT else 0)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == AT and self.global_rank == 1:
            time.sleep(600)  # what never comes
        return super().validation_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != AT:
            return
        if self.case == "save" and self.global_rank == 0:
            self.trainer.save_checkpoint("alone.ckpt")
        elif self.case == "one computes":
            compute(2.5 * LIMIT * self.global_rank)
        elif self.case == "stops" and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)  # it answers nothing, and its connections stay
        elif self.case == "all slow":
            self.num_copied = copy.deepcopy(vars(self.trainer.strategy).get("_hangs")) is not None


class Blocks:
    """The batches of a loader, of which rank 1 never gets the one behind the third."""

    def __init__(self, batches: Any, rank: int) -> None:
        self.batches, self.rank = batches, rank

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for number, (tokens, *others) in enumerate(self.batches):
            if number == AT + 1 and self.rank == 1:
                time.sleep(600)  # what never comes
            yield [tokens.roll(self.rank, 1), *others]  # no other rank's samples


def compute(seconds: float) -> None:
    """Work for so long, without a collective."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(100).sum()


def run(case: str, strategy: str) -> None:
    """A fit or a validation with that hang, which ends this process."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(f"{strategy}:hang_timeout={LIMIT}", 2, default_root_dir=Path.cwd())
    batches: Any = loader(num_readers(strategy, 2), 5)
    if case == "data":
        batches = Blocks(batches, int(os.environ["LOCAL_RANK"]))
    if case == "validation":
        trainer.validate(Hangs(case), batches, verbose=False)
    else:
        trainer.fit(Hangs(case), batches)


def slow(case: str, strategy: str, limit: float = LIMIT) -> Ending:
    """A fit that is slow and sound."""
    L.seed_everything(3, verbose=False)
    trainer, module, said = trainer_for(f"{strategy}:hang_timeout={limit}", 2), Hangs(case), []
    with mock.patch.object(hangs, "write", said.append):
        trainer.fit(module, loader(num_readers(strategy, 2), 5))
    watching = [thread for thread in threading.enumerate() if thread.name == "rank-hangs"]
    return Ending(trainer.global_step, said, module.num_copied, len(watching))


if __name__ == "__main__":
    run(*sys.argv[1:3])
