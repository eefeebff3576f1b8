"""Checkpoints that rank 0 writes for longer than a collective waits."""

from __future__ import annotations

import contextlib
import io
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_parallel import _torch
from lightning_parallel.strategies import failures
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import trainer_for

TIMEOUT = 3.0


class Slow(TorchCheckpointIO):
    """Writes for longer than `TIMEOUT`."""

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(2 * TIMEOUT)
        super().save_checkpoint(*args, **kwargs)


def saved(strategy: str, path: Path) -> tuple[float, bool]:
    """Seconds that this rank takes for a checkpoint, and whether that is there then."""
    assert dist.group.WORLD is not None
    module = Saves(path)
    try:
        trainer_for(strategy, 2, plugins=[Slow()], max_steps=1).fit(module, loader(2))
    finally:
        _torch.groups.set_timeout(dist.group.WORLD, timedelta(minutes=30))
    return module.seconds, module.is_there


class Saves(ByteGPT):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path, self.seconds, self.is_there = path, 0.0, False

    def on_train_batch_end(self, *args: Any) -> None:
        _torch.groups.set_timeout(dist.group.WORLD, timedelta(seconds=TIMEOUT))
        began = time.monotonic()
        self.trainer.save_checkpoint(self.path)
        self.seconds, self.is_there = time.monotonic() - began, self.path.is_file()


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_ranks_wait_for_a_checkpoint_as_long_as_it_takes(ranks: Any, tmp_path: Path, name: str) -> None:
    found = ranks(2).run(saved, name, tmp_path / "long.ckpt")
    assert all(seconds > TIMEOUT and is_there for seconds, is_there in found)
    assert "state_dict" in torch.load(tmp_path / "long.ckpt", weights_only=False)


class SavesAlone(ByteGPT):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint(self.path)
        else:
            time.sleep(1.0)


def saved_alone(path: Path) -> tuple[str, str]:
    """The error with which a rank ends, and what it says before."""
    said = io.StringIO()
    with mock.patch.object(failures, "PATIENCE", 0.3), contextlib.redirect_stderr(said):
        try:
            trainer_for("ddp_custom", 2, max_steps=1).fit(SavesAlone(path), loader(2))
        except RuntimeError as error:
            return str(error), said.getvalue()
    return "", said.getvalue()


def test_a_rank_that_saves_alone_does_not_wait_for_ever(ranks: Any, tmp_path: Path) -> None:
    """Under sharding, the others wait for it, too, as they give back a whole module; it still says why."""
    (error, said), second = ranks(2).run(saved_alone, tmp_path / "alone.ckpt", deadline=60)
    assert second == ("", "")
    assert "rank 0 saves a checkpoint and waits for the other ranks, but one of them has ended its run: call" in error
    assert said.count("rank 0 saves a checkpoint and waits for the other ranks since 0 s: call trainer.save") == 1
