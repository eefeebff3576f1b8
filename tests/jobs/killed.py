"""A run that may be killed at any moment: what it has read is on the disk before each step, and it always goes on.

torchrun --nproc-per-node=2 --max-restarts=2 -m tests.jobs.killed FOLDER fsdp_custom --epochs 2
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import full_state_dict
from lightning_parallel.callbacks import GlobalBatch
from tests.data import data_of
from tests.models.cases import next_token_loss
from tests.models.pipelined import Deep
from tests.parity import trainer_for

NUM_SAMPLES = 32
BATCH = 4
"""Samples of a step over all ranks: 8 steps an epoch."""
STEPS = NUM_SAMPLES // BATCH
FINAL = "final.pt"
SAVED = "saved"


class Noting(Deep):
    """Notes each batch before it is read, and saves much.

    Args:
        folder: Where it notes that.
        ballast: Numbers in each checkpoint, so that writing one takes a while.
        step_time: Seconds that a step takes at least.
    """

    def __init__(self, folder: Path, ballast: int, step_time: float) -> None:
        super().__init__()
        self.folder, self.step_time, self.attempt = folder, step_time, 0
        self.register_buffer("ballast", torch.zeros(ballast))

    def note(self, *entry: Any) -> None:
        """Add a line that a kill cannot take back."""
        with (self.folder / f"notes-{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def on_train_start(self) -> None:
        self.attempt = self.trainer.strategy.broadcast(time.time_ns())
        self.note("start", self.attempt, self.global_step, self.trainer.world_size, os.getpid())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("read", self.attempt, self.global_step, self.current_epoch, batch[1].tolist())
        time.sleep(self.step_time)

    def loss(self, tokens: Tensor, _: Tensor) -> Tensor:  # type: ignore[override]
        return next_token_loss(self(tokens), tokens)


def notes(folder: Path, kind: str) -> list[list[Any]]:
    """What all ranks have noted of that kind, without its name; in order of attempts."""
    lines = [line for path in folder.glob("notes-*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    # A line is whole when its end is there: one is just being written.
    return sorted(entry[1:] for entry in (json.loads(line) for line in lines if line[-1] == "\n") if entry[0] == kind)


def history(folder: Path) -> dict[int, Counter[int]]:
    """Epoch -> how often each sample was read in it, by steps that count: no later attempt has gone on before them."""
    starts = {attempt: step for attempt, step, *_ in notes(folder, "start")}
    found: dict[int, Counter[int]] = {}
    for attempt, step, epoch, samples in notes(folder, "read"):
        if all(step < start for later, start in starts.items() if later > attempt):
            found.setdefault(epoch, Counter()).update(samples)
    return found


def train(folder: str, name: str, epochs: int, ballast: int, step_time: float, batch_size: int = BATCH // 2) -> None:
    """Go on from the newest checkpoint in `folder`, to the end; then the weights are in `FINAL`."""
    L.seed_everything(3, verbose=False)
    warnings.filterwarnings("ignore", message=".*there is no last checkpoint available.*")
    data = TensorDataset(data_of("byte_gpt", NUM_SAMPLES, BATCH)[:][0], torch.arange(NUM_SAMPLES))
    saved = ModelCheckpoint(Path(folder, SAVED), every_n_train_steps=2, save_last=True)
    trainer = trainer_for(
        name,
        int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        callbacks=[saved, GlobalBatch(BATCH)],
        enable_checkpointing=True,
        max_epochs=epochs,
    )
    module = Noting(Path(folder), ballast, step_time)
    trainer.fit(module, DataLoader(data, batch_size=batch_size, shuffle=True), ckpt_path="last")
    weights = full_state_dict(trainer)
    if trainer.is_global_zero:
        torch.save(weights, Path(folder, FINAL))


def main() -> None:
    """Train, as a script."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("name")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ballast", type=int, default=1)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--batch-size", type=int, default=BATCH // 2)
    given = parser.parse_args()
    train(given.folder, given.name, given.epochs, given.ballast, given.step_time, given.batch_size)


if __name__ == "__main__":
    main()
