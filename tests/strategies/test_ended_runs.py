"""Whole runs, as a user starts them, that a signal ends: their exit status, what they leave, and how they go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE = 120.0

SCRIPT = """
import sys, time
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.data import loader
from tests.models.pipelined import DeepTied
from tests.names import num_readers
from tests.parity import trainer_for

class Slow(DeepTied):
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        import torch
        checkpoint["much"] = torch.zeros(int(sys.argv[3]))

name, steps = sys.argv[1], int(sys.argv[2])
L.seed_everything(3, verbose=False)
callback = ModelCheckpoint("saved", every_n_train_steps=3, save_last=True)
trainer = trainer_for(name, 2, callbacks=[callback], enable_checkpointing=True, max_steps=steps, max_epochs=-1)
trainer.fit(Slow(), loader(num_readers(name.partition(":")[0], 2), 40), ckpt_path="last")
sys.stdout.write(f"updates {trainer.global_step}\\n")  # at once: two ranks write into one pipe
"""


@pytest.fixture
def start(tmp_path: Path) -> Any:
    """Start a run of two ranks, in a process group of its own, of which nothing is left in the end."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def run(name: str, steps: int, size: int = 1) -> subprocess.Popen[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(script), name, str(steps), str(size)]
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, text=True, stdout=pipe, stderr=pipe, start_new_session=True
        )
        started.append(process)
        return process

    yield run
    left = [process.pid for process in started if is_alive(process.pid)]
    for group in left:
        os.killpg(group, signal.SIGKILL)
    assert left == []


def is_alive(group: int) -> bool:
    end = time.monotonic() + 15
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.1)
    return True


def wait_for(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.parametrize(("to_all", "name"), [(True, "fsdp_custom"), (False, "fsdp_custom:checkpoint=async-sharded")])
def test_a_run_that_a_scheduler_stops(to_all: bool, name: str, start: Any, tmp_path: Path) -> None:
    first = start(name, 100_000)
    wait_for((tmp_path / "saved" / "last.ckpt").exists)
    time.sleep(0.3)
    (os.killpg if to_all else os.kill)(first.pid, signal.SIGTERM)
    _, said = first.communicate(timeout=DEADLINE)
    assert first.returncode == 143, said[-3000:]
    assert "Traceback" not in said
    second = start(name, 12)
    out, said = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, said[-3000:]
    assert "updates " in out


@pytest.mark.slow
def test_a_run_that_is_killed_in_a_save_goes_on(start: Any, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    first = start("ddp_custom", 100_000, 20_000_000)
    wait_for((folder / "last.ckpt").exists)
    wait_for(lambda: list(folder.glob(".*.partial")))
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate(timeout=DEADLINE)
    assert list(folder.glob(".*.partial"))
    second = start("ddp_custom", 60, 1)
    out, said = second.communicate(timeout=DEADLINE)
    assert second.returncode == 0, said[-3000:]
    assert out.splitlines() == ["updates 60"] * 2
    assert not list(folder.glob(".*.partial"))
