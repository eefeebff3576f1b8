"""Checkpoints that are written while training goes on: what they hold, and who hears that one could not be written."""

from __future__ import annotations

import errno
import os
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_parallel import CheckpointError
from lightning_parallel.checkpoint.folder_writer import FolderWriter
from lightning_parallel.checkpoint.sharded_folder import damage_of_folder, open_folder
from lightning_parallel.checkpoint.whole_file import write_whole
from tests.data import loader
from tests.jobs.checkpoints import equal_contents
from tests.models.cases import ByteGPT
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

NAMES = ["ddp_custom", "zero1_custom", "fsdp_custom", "pp_custom"]
FORMS = ["whole", "sharded"]
WRITING = 0.7
"""Seconds that a disk takes here."""
WHOLE = "lightning_parallel.strategies.checkpoint_files.write_whole"


class SavesOnce(Callback):
    """Saves after the second step; notes how long that takes, and how long the next two steps do."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds, self.began = path, list[float](), 0.0
        self.is_there = True

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            self.began = time.monotonic()
            trainer.save_checkpoint(self.path)
            self.seconds.append(time.monotonic() - self.began)
        if trainer.global_step == 4:
            self.seconds.append(time.monotonic() - self.began)
            self.is_there = self.path.exists()


def saved(strategy: str, form: str, path: Path) -> tuple[list[float], bool]:
    """Train on while a slow disk writes; the seconds, and whether the checkpoint was there two steps later."""
    parts = FolderWriter.write

    def slow_parts(*args: Any) -> Any:
        time.sleep(WRITING)
        return parts(*args)

    def slow_whole(*args: Any) -> None:
        time.sleep(WRITING)
        write_whole(*args)

    L.seed_everything(3, verbose=False)
    callback = SavesOnce(path)
    trainer = trainer_for(f"{strategy}:checkpoint={form}", 2, callbacks=[callback], max_steps=4)
    with mock.patch.object(FolderWriter, "write", slow_parts), mock.patch(WHOLE, slow_whole):
        trainer.fit(DeepTied("adamw"), loader(num_readers(strategy, 2)))
    assert path.exists()  # the last one is awaited
    return callback.seconds, callback.is_there


def read(path: Path) -> Any:
    if path.is_dir():
        assert damage_of_folder(path) == ""
        return open_folder(path, lambda rest: torch.load(rest, weights_only=True))
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_it_holds_the_step_at_which_it_was_asked_for(name: str, form: str, ranks: Any, tmp_path: Path) -> None:
    (waited, was_there), *_ = ranks(2).run(saved, name, form, tmp_path / "plain.ckpt")
    assert was_there
    assert waited[0] > WRITING
    for seconds, is_there in ranks(2).run(saved, name, f"async-{form}", tmp_path / "async.ckpt"):
        assert not is_there
        assert seconds[1] < WRITING
    ours, theirs = read(tmp_path / "async.ckpt"), read(tmp_path / "plain.ckpt")
    assert equal_contents(ours, theirs) == 0.0
    assert ours["global_step"] == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["async.ckpt", "plain.ckpt"]


def failing(strategy: str, folder: Path) -> tuple[int, str, int]:
    """The updates, the error and the number of warnings of a fit whose first checkpoint cannot be written."""
    parts, of_whole, attempts = FolderWriter.write, write_whole, [0]

    def is_full() -> bool:
        time.sleep(0.2)
        attempts[0] += 1
        return attempts[0] == 1

    def write(*args: Any) -> Any:
        if is_full() and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return parts(*args)

    def write_file(value: Any, path: Path) -> None:
        if is_full():
            raise CheckpointError(f"the checkpoint {path} could not be written: No space left on device")
        of_whole(value, path)

    class Slow(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.1)

    callbacks = [ModelCheckpoint(folder, every_n_train_steps=10), Slow()]
    trainer = trainer_for(strategy, 2, callbacks=callbacks, enable_checkpointing=True, max_steps=20)
    words = ""
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(FolderWriter, "write", write):
        warnings.simplefilter("always")
        with mock.patch(WHOLE, write_file):
            try:
                trainer.fit(DeepTied(), loader(num_readers(strategy.partition(":")[0], 2), 20))
            except CheckpointError as error:
                words = str(error)
    return trainer.global_step, words, sum("could not be written" in str(each.message) for each in caught)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "pp_custom"])
def test_all_ranks_end_at_the_same_step(name: str, form: str, ranks: Any, tmp_path: Path) -> None:
    (step, words, _), (other_step, other_words, _) = ranks(2).run(failing, f"{name}:checkpoint=async-{form}", tmp_path)
    assert 10 < step == other_step < 20
    assert words == other_words
    assert "could not be written: No space left on device" in words


@pytest.mark.parametrize("form", FORMS)
def test_training_goes_on_if_asked_for(form: str, ranks: Any, tmp_path: Path) -> None:
    strategy = f"fsdp_custom:checkpoint=async-{form},on_save_error=warn"
    (step, words, num_said), (other_step, other_words, num_other) = ranks(2).run(failing, strategy, tmp_path)
    assert (step, words, num_said) == (20, "", 1)
    assert (other_step, other_words, num_other) == (20, "", 0)
    assert [each.name for each in tmp_path.iterdir()] == ["epoch=0-step=20.ckpt"]


class KeepsOne(ModelCheckpoint):
    """Notes the checkpoints that are there behind each step."""

    seen: list[list[str]]

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        dist.barrier()
        self.seen.append(sorted(each.name for each in Path(str(self.dirpath)).glob("*.ckpt")))
        dist.barrier()


def kept(strategy: str, folder: Path) -> list[list[str]]:
    parts = FolderWriter.write

    def slow(*args: Any) -> Any:
        time.sleep(0.3)
        return parts(*args)

    callback = KeepsOne(folder, every_n_train_steps=1, save_top_k=1)
    callback.seen = []
    trainer = trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True, max_steps=3)
    with mock.patch.object(FolderWriter, "write", slow):
        trainer.fit(DeepTied(), loader(num_readers(strategy.partition(":")[0], 2)))
    dist.barrier()
    return [*callback.seen, sorted(each.name for each in folder.iterdir())]


@pytest.mark.parametrize("name", ["fsdp_custom", "pp_custom"])
def test_the_one_before_is_there_until_the_next_one_is(name: str, ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(kept, f"{name}:checkpoint=async-sharded", tmp_path)
    one, two, three = (f"epoch=0-step={step}.ckpt" for step in (1, 2, 3))
    assert first == second == [[], [one], [two], [three]]


def scheduled(strategy: str, path: str, resumes: bool) -> list[float]:
    """The learning rates of a fit by milestones, which is saved in its middle, or goes on from there."""
    rates: list[float] = []

    class Rates(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            rates.append(float(trainer.optimizers[0].param_groups[0]["lr"]))
            if trainer.global_step == 2 and not resumes:
                trainer.save_checkpoint(path)

    trainer = trainer_for(strategy, 2, callbacks=[Rates()])
    trainer.fit(ByMilestones(), loader(2, 6), ckpt_path=path if resumes else None)
    return rates


class ByMilestones(ByteGPT):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5], gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.parametrize("form", ["async-whole", "async-sharded"])
def test_milestones_of_a_schedule_are_saved_as_they_are(ranks: Any, tmp_path: Path, form: str) -> None:
    """They are a Counter, of which an update with itself would count each twice."""
    strategy = f"fsdp_custom:checkpoint={form}"
    whole = ranks(2).run(scheduled, strategy, str(tmp_path / "a.ckpt"), False)[0]
    assert ranks(2).run(scheduled, strategy, str(tmp_path / "a.ckpt"), True)[0] == whole[2:]
