"""Ranks that do not find the same checkpoint: each looks for the last one by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_parallel import ConfigurationError
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import trainer_for


def fitted(strategy: str, folder: str, epochs: int, ckpt_path: str | None, own: bool) -> int | str:
    """The steps of a fit that saves its last state, or the words of its refusal.

    Args:
        strategy: The name.
        folder: For checkpoints.
        epochs: How many.
        ckpt_path: Where to go on.
        own: Whether rank 1 has a folder of its own, as where hosts share no disk.
    """
    saves = ModelCheckpoint(folder, save_last=True)
    trainer = trainer_for(strategy, 2, max_epochs=epochs, callbacks=[saves], enable_checkpointing=True)
    readers = num_readers(strategy.partition(":")[0], 2)
    if own and trainer.global_rank == 1:
        saves.dirpath = f"{folder}-1"
    try:
        trainer.fit(ByteGPT("adamw"), loader(readers, 2), ckpt_path=ckpt_path)
    except ConfigurationError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "pp_custom"])
def test_a_rank_that_finds_none_is_refused(ranks: Any, tmp_path: Path, strategy: str, form: str) -> None:
    """Stock Lightning would let it begin anew beside the others."""
    strategy = f"{strategy}:checkpoint={form}"
    folder = str(tmp_path / "saved")
    assert ranks(2).run(fitted, strategy, folder, 1, None, False) == [2, 2]
    first, second = ranks(2).run(fitted, strategy, folder, 2, "last", True)
    assert f"rank 0 has found {folder}/last.ckpt, and rank 1 none" in first
    assert "rank 0 says why" in second


@pytest.mark.parametrize("form", ["whole", "sharded"])
def test_a_rank_that_finds_an_older_one_is_refused(ranks: Any, tmp_path: Path, form: str) -> None:
    folder, strategy = str(tmp_path / "saved"), f"ddp_custom:checkpoint={form}"
    ranks(2).run(fitted, strategy, folder, 1, None, False)
    shutil.copytree(folder, f"{folder}-1")
    ranks(2).run(fitted, strategy, folder, 2, "last", False)
    first, _ = ranks(2).run(fitted, strategy, folder, 3, "last", True)
    assert "last.ckpt (epoch 1, step 4), and rank 1 " in first
    assert "(epoch 0, step 2)" in first


def test_one_that_has_a_copy_goes_on(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks(2).run(fitted, "ddp_custom", folder, 1, None, False)
    shutil.copytree(folder, f"{folder}-1")
    assert ranks(2).run(fitted, "ddp_custom", folder, 2, "last", True) == [4, 4]


def test_all_go_on_from_where_they_were(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks(2).run(fitted, "fsdp_custom", folder, 1, None, False)
    assert ranks(2).run(fitted, "fsdp_custom", folder, 2, "last", False) == [4, 4]
    assert ranks(2).run(fitted, "fsdp_custom", folder, 3, f"{folder}/last.ckpt", False) == [6, 6]


def read_by_rank_0(strategy: str, path: str) -> int:
    """The step of a checkpoint that one rank alone looks into, in a hook."""
    steps = [0]

    class Looks(Callback):
        def on_train_end(self, trainer: Trainer, *args: Any) -> None:
            if trainer.is_global_zero:
                steps[0] = trainer.strategy.load_checkpoint(path)["global_step"]

    trainer_for(strategy, 2, callbacks=[Looks()]).fit(ByteGPT("adamw"), loader(2, 1), ckpt_path=None)
    return steps[0]


def test_one_rank_may_look_into_a_file_by_itself(ranks: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    ranks(2).run(fitted, "fsdp_custom:checkpoint=whole", folder, 1, None, False)
    assert ranks(2).run(read_by_rank_0, "fsdp_custom", f"{folder}/last.ckpt") == [2, 0]
