"""A checkpoint that rank 0 cannot write is one error on every rank, or a warning."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel import CheckpointError
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

NAMES = ["ddp_custom", "fsdp_custom", "pp_custom"]


def fit(strategy: str, folder: Path, **kwargs: Any) -> tuple[int, str, float]:
    """Updates, the error, and the seconds that the fit took."""
    callback = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer = trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True, **kwargs)
    began, words = time.monotonic(), ""
    try:
        trainer.fit(DeepTied(), loader(num_readers(strategy.partition(":")[0], 2)))
    except CheckpointError as error:
        words = str(error)
    return trainer.global_step, words, time.monotonic() - began


@pytest.mark.parametrize("name", NAMES)
def test_all_ranks_have_one_error(name: str, ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for step, words, seconds in ranks(2).run(fit, name, tmp_path / "file" / "folder"):
        assert step == 2
        assert "epoch=0-step=2.ckpt could not be written: Not a directory. Its tensors take " in words
        assert "on_save_error='warn'" in words
        assert seconds < 20


def warned(strategy: str, folder: Path) -> tuple[tuple[int, str, float], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit(strategy, folder)
    return found, [str(each.message) for each in caught if "could not be written" in str(each.message)]


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_if_asked_for(name: str, ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (first, of_first), (second, of_second) = ranks(2).run(
        warned, f"{name}:on_save_error=warn", tmp_path / "file" / "folder"
    )
    assert (first[:2], second[:2]) == ((4, ""), (4, ""))
    assert (len(of_first), len(of_second)) == (2, 0)  # one for each checkpoint, on rank 0


def full_then_free(strategy: str, folder: Path) -> list[list[str]]:
    """Names of the files that are there behind each of three saves, of which the second one fails."""
    seen = []

    class Fails(ModelCheckpoint):
        def on_train_batch_end(self, *args: Any) -> None:
            trainer = args[0]
            blocker = folder / "epoch=0-step=2.ckpt"
            if trainer.global_step == 2 and trainer.is_global_zero:
                (blocker / "full").mkdir(parents=True)  # no file can take the place of a folder
            super().on_train_batch_end(*args)
            seen.append(sorted(each.name for each in folder.iterdir() if each.is_file()))
            trainer.strategy.barrier()

    callbacks = [Fails(folder, every_n_train_steps=1, enable_version_counter=False)]
    trainer = trainer_for(strategy, 2, callbacks=callbacks, enable_checkpointing=True, max_steps=3)
    trainer.fit(DeepTied(), loader(num_readers(strategy, 2)))
    return seen


@pytest.mark.filterwarnings("ignore")
def test_a_save_that_fails_does_not_remove_the_one_before(ranks: Any, tmp_path: Path) -> None:
    seen = ranks(2).run(quietly, full_then_free, "ddp_custom:on_save_error=warn", tmp_path)[0]
    assert seen == [["epoch=0-step=1.ckpt"], ["epoch=0-step=1.ckpt"], ["epoch=0-step=3.ckpt"]]


def quietly(job: Any, *args: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return job(*args)


def remote(strategy: str) -> list[str]:
    callback = ModelCheckpoint("memory://checkpoints", every_n_train_steps=2)
    trainer_for(strategy, 2, callbacks=[callback], enable_checkpointing=True).fit(DeepTied(), loader(2))
    found = [path for path in fsspec.filesystem("memory").find("/") if path.endswith(".ckpt")]
    return [Path(path).name for path in found]


def test_other_file_systems_are_written_as_before(ranks: Any) -> None:
    first, second = ranks(2).run(remote, "ddp_custom")
    assert (first, second) == (["epoch=0-step=4.ckpt"], [])


def after_fit(strategy: str, path: Path) -> str:
    trainer = trainer_for(strategy, 2)
    trainer.fit(DeepTied(), loader(num_readers(strategy, 2)))
    trainer.save_checkpoint(path)
    try:
        trainer.save_checkpoint(path / "within")
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_after_the_fit_as_within(name: str, ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2).run(after_fit, name, tmp_path / "a.ckpt")
    assert first == second
    assert "a.ckpt/within could not be written" in first
    assert torch.load(tmp_path / "a.ckpt", weights_only=False)["global_step"] == 4
