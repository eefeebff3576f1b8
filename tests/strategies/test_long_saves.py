"""Checkpoints that rank 0 writes for longer than a collective waits."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_parallel import _torch
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
