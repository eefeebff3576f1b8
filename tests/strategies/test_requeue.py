"""SLURM's signal before a time limit: all ranks save behind the same step, and the job is queued when that is there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_parallel.checkpoint import folder_writer, whole_file
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies import stops
from tests.data import loader
from tests.jobs.stops import Signals, Slow, module
from tests.names import num_readers
from tests.parity import trainer_for

SCONTROL = """#!/bin/bash
echo "$@" > {folder}/queued
ls {folder} | grep ckpt >> {folder}/queued
"""
"""Notes what it is asked for, and which checkpoints are there just then."""
STEPS = 150


class Tells(Slow):
    """Notes where it begins."""

    begins = -1

    def on_train_start(self) -> None:
        self.begins = self.global_step


def _slow(write: Any) -> Any:
    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.5)
        return write(*args, **kwargs)

    return slow


def requeued(strategy: str, folder: Path, signalled: list[int]) -> tuple[int, int]:
    """A fit whose ranks `signalled` have SIGUSR1, if any; its first update, and its last."""
    rank = os.environ["LOCAL_RANK"]
    numbers = {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
    }
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "lm", "PATH": f"{folder}:{os.environ['PATH']}"}
    processes = of_all_ranks(os.getpid())
    to = [processes[each] for each in signalled]
    signals = [Signals(0.1, signal.SIGUSR1, to)] if to and int(rank) == 0 else []
    fitted = Tells()
    with (
        mock.patch.dict(os.environ, {**numbers, **job}),
        mock.patch.object(stops, "POLL", 0.05),
        mock.patch.object(whole_file, "save_into", _slow(whole_file.save_into)),
        mock.patch.object(folder_writer.FolderWriter, "write", _slow(folder_writer.FolderWriter.write)),
    ):
        trainer = trainer_for(
            strategy, 2, callbacks=signals, plugins=[SLURMEnvironment(auto_requeue=True)], default_root_dir=folder
        )
        fitted.load_state_dict(module().state_dict())
        trainer.fit(fitted, loader(num_readers(strategy.partition(":")[0], 2), STEPS))
        dist.barrier()
    return fitted.begins, trainer.global_step


@pytest.mark.parametrize("form", ["async-whole", "async-sharded", "whole"])
@pytest.mark.parametrize(("name", "signalled"), [("ddp_custom", [0, 1]), ("fsdp_custom", [1]), ("pp_custom", [0])])
def test_a_job_is_queued_again_behind_its_checkpoint(
    name: str, signalled: list[int], form: str, ranks: Any, tmp_path: Path
) -> None:
    (tmp_path / "scontrol").write_text(SCONTROL.format(folder=tmp_path))
    (tmp_path / "scontrol").chmod(0o755)
    strategy = f"{name}:checkpoint={form}"
    assert ranks(2).run(requeued, strategy, tmp_path, signalled) == [(0, STEPS)] * 2
    assert (tmp_path / "queued").read_text().split() == ["requeue", "7", "hpc_ckpt_1.ckpt"]
    assert (tmp_path / "hpc_ckpt_1.ckpt").is_dir() == form.endswith("sharded")
    (first, end), other = ranks(2).run(requeued, strategy, tmp_path, [])
    assert other == (first, end)
    assert 0 < first < STEPS  # Lightning finds it by itself
    assert end == STEPS
