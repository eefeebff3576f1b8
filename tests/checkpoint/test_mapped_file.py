"""A whole file that several ranks read is mapped: its memory is shared, and a run does not depend on it afterwards."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_parallel import full_state_dict
from lightning_parallel.callbacks import ExponentialMovingAverage
from lightning_parallel.checkpoint.whole_file import read_mapped
from lightning_parallel.strategies.checkpoint_files import CheckpointFiles
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import TOLERANCE, difference, trainer_for

MB = 1 << 20


class Noting(ByteGPT):
    """A module with a metric that is saved, and with a state that hooks keep."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.mean = MeanMetric()
        self.mean.persistent(True)
        self.kept = torch.zeros(5)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        self.kept += 1
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["kept"] = {"inner": [self.kept]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.kept = checkpoint["kept"]["inner"][0]


class Emptied(Callback):
    """Empties the file of the checkpoint once training begins."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            os.truncate(self.path, 0)
        trainer.strategy.barrier()


def trained(strategy: str, num_ranks: int, path: str, epochs: int, resumes: bool) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    average = ExponentialMovingAverage(0.5)
    module = Noting()
    callbacks = [average, *([Emptied(path)] if resumes else [])]
    trainer = trainer_for(strategy, num_ranks, max_epochs=epochs, callbacks=callbacks)
    trainer.fit(module, loader(num_readers(strategy, num_ranks), 2), ckpt_path=path if resumes else None)
    if not resumes:
        trainer.save_checkpoint(path)
    return {
        "weights": full_state_dict(trainer),
        "average": average.full_state_dict(trainer),
        "kept": {"kept": module.kept},
        "steps": len(trainer.optimizers[0].state) > 0,
    }


@pytest.mark.parametrize("strategy", ["ddp_custom", "zero1_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_a_file_that_is_gone_does_not_end_the_run(ranks: Any, tmp_path: Path, strategy: str) -> None:
    """Optimizers, metrics, callbacks and what hooks keep are in memory: a rank that touched the file would die."""
    path = str(tmp_path / "saved.ckpt")
    ranks(2).run(trained, strategy, 2, path, 1, False)
    found = ranks(2).run(trained, strategy, 2, path, 2, True)[0]
    assert Path(path).stat().st_size == 0
    whole = ranks(2).run(trained, strategy, 2, path, 2, False)[0]
    for each in ("weights", "average", "kept"):
        assert difference(found[each], whole[each]) <= TOLERANCE, each


def own_memory() -> int:
    """Bytes of this process that no file has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def growth_in_reading(path: str) -> int:
    """Bytes that this rank's memory grows by when it reads a checkpoint, and each value of it."""
    before = own_memory()
    checkpoint = CheckpointFiles().load_checkpoint(path)
    total = checkpoint["state_dict"]["weight"].sum() + checkpoint["optimizer_states"][0]["state"][0]["moment"].sum()
    assert total == 2 * 32 * MB
    return own_memory() - before


def test_ranks_share_the_memory_of_a_file(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    ones = torch.ones(32 * MB)
    state = {"state": {0: {"moment": ones.clone()}}, "param_groups": []}
    torch.save({"state_dict": {"weight": ones}, "optimizer_states": [state]}, path)
    assert path.stat().st_size >= 256 * MB
    for growth in ranks(2).run(growth_in_reading, str(path)):
        assert growth < 32 * MB


def test_what_is_no_weight_is_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    mean = torch.ones(1000)
    torch.save({"state_dict": {"w": torch.ones(1000)}, "callbacks": {"A": {"mean": mean, "same": mean}}, "n": 3}, path)
    read = read_mapped(path, weights_only=True)
    os.truncate(path, 0)
    state = read["callbacks"]["A"]
    assert read["n"] == 3
    assert torch.equal(state["mean"], mean)
    assert state["mean"].data_ptr() == state["same"].data_ptr()


class Named(dict):  # type: ignore[type-arg]
    """A class of the user's."""


def test_what_is_in_memory_is_what_was_saved(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    number = torch.tensor([1 + 2j])
    schedule = {"milestones": Counter({3: 1, 5: 1}), "last": torch.tensor(0.1)}
    own = Named(value=nn.Parameter(torch.ones(2)), conj=number.conj(), of=[torch.ones(2, requires_grad=True)])
    torch.save({"state_dict": {}, "lr_schedulers": [schedule], "own": own}, path)
    read = read_mapped(path, weights_only=False)
    assert read["lr_schedulers"][0]["milestones"] == schedule["milestones"]
    assert type(read["own"]) is Named
    assert type(read["own"]["value"]) is nn.Parameter
    assert torch.equal(read["own"]["conj"], number.conj())
    assert read["own"]["of"][0].requires_grad


def test_files_of_the_old_format_are_read(ranks: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    value = {"state_dict": {"weight": torch.arange(5.0)}}
    torch.save(value, path, _use_new_zipfile_serialization=False)
    for found in ranks(2).run(CheckpointFiles().load_checkpoint, str(path)):
        assert torch.equal(found["state_dict"]["weight"], value["state_dict"]["weight"])
