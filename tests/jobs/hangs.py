"""Fits in which ranks wait for others that do not come, for the ranks of a pool and as a script."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

LIMIT = 2.0
"""Seconds for which a rank may be still in these fits."""
AT = 2
"""The batch of the hang."""


class Hangs(DeepTied):
    """Does on some ranks only what all have to do."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == AT and self.global_rank == 0:
            if self.case == "gather":
                self.all_gather(torch.ones(3))
            elif self.case == "barrier":
                self.trainer.strategy.barrier()
        if self.case == "slow":
            time.sleep(1.5 * LIMIT)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == AT and self.global_rank == 0 and self.case == "save":
            self.trainer.save_checkpoint("alone.ckpt")
        if batch_idx == AT and self.case == "uneven-slow":
            compute(2.5 * LIMIT * self.global_rank)
        if batch_idx == AT and self.case == "ends" and self.global_rank == 1:
            os._exit(0)


class Blocks:
    """The batches of a loader, of which rank 1 never gets the third one."""

    def __init__(self, batches: Any, rank: int) -> None:
        self.batches, self.rank = batches, rank

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        for number, batch in enumerate(self.batches):
            if number == AT + 1 and self.rank == 1:
                time.sleep(600)  # what never comes
            yield batch


def compute(seconds: float) -> None:
    """Work for so long, without a collective."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.ones(100).sum()


def fit(case: str, strategy: str, limit: float = LIMIT, devices: int = 2) -> int:
    """A fit with that hang; the updates that it gets to."""
    L.seed_everything(3, verbose=False)
    module = Hangs(case)
    trainer = trainer_for(f"{strategy}:hang_timeout={limit}", devices, default_root_dir=os.getcwd())
    batches: Any = loader(num_readers(strategy, devices), 5)
    if case == "data":
        batches = Blocks(batches, int(os.environ.get("LOCAL_RANK", "0")))
    assert isinstance(batches, DataLoader | Blocks)
    trainer.fit(module, batches)
    return trainer.global_step


if __name__ == "__main__":
    fit(*sys.argv[1:3])
