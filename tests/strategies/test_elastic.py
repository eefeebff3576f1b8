"""torchrun starts ranks again of which one was killed: as many as before, or those that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs.killed import BATCH, FINAL, NUM_SAMPLES, STEPS, history, notes, train
from tests.parity import TOLERANCE, difference
from tests.rank_pool import free_port

ROOT = Path(__file__).parents[2]
DEADLINE = 100.0
EPOCHS = 2
NAME = "fsdp_custom"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """Start an agent of torchrun; none is left in the end, nor any of their ranks."""
    started: list[subprocess.Popen[bytes]] = []

    def agent(*options: str) -> subprocess.Popen[bytes]:
        ours = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1", "--monitor-interval=0.1", *options]
        theirs = ["-m", "tests.jobs.killed", str(tmp_path), NAME, f"--epochs={EPOCHS}", "--step-time=0.05"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (tmp_path / f"said-{len(started)}").open("wb") as out:
            started.append(subprocess.Popen([*ours, *theirs], env=environment, stdout=out, stderr=subprocess.STDOUT))
        return started[-1]

    yield agent
    for pid in {pid for *_, pid in notes(tmp_path, "start")} | {each.pid for each in started if each.poll() is None}:
        if is_ours(pid):
            os.kill(pid, signal.SIGKILL)
    for each in started:
        each.wait()


def is_ours(pid: int) -> bool:
    """Whether a process still is a rank or an agent: its number may be another one's by now."""
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and b"tests.jobs.killed" in command.read_bytes()


def kill_a_rank(folder: Path, agent: subprocess.Popen[bytes] | None = None) -> None:
    """Kill rank 1 in the first epoch, behind some steps, and its agent before."""
    end = time.monotonic() + DEADLINE
    while not any(step >= 3 for _, step, *_ in notes(folder, "read")):
        assert time.monotonic() < end, said(folder)
        time.sleep(0.01)
    if agent is not None:
        agent.kill()
    lines = (folder / "notes-1.jsonl").read_text().splitlines()
    os.kill(int(lines[0].rpartition(",")[2].rstrip("] ")), signal.SIGKILL)


def said(folder: Path) -> str:
    return "".join(path.read_text()[-5000:] for path in folder.glob("said-*"))


def check(folder: Path, agent: subprocess.Popen[bytes], sizes: list[int], ranks: Any, tmp: Path) -> None:
    """The run has ended with the weights of one that nobody has killed, on these numbers of ranks."""
    assert agent.wait(DEADLINE) == 0, said(folder)
    starts = {attempt: size for attempt, _, size, _ in notes(folder, "start")}
    assert list(starts.values()) == sizes
    assert max(step for _, step, *_ in notes(folder, "start")) >= 2  # from a checkpoint
    assert history(folder) == {epoch: Counter(range(NUM_SAMPLES)) for epoch in range(EPOCHS)}
    assert max(step for _, step, *_ in notes(folder, "read")) == EPOCHS * STEPS - 1  # of BATCH samples each
    tmp.mkdir()
    ranks(2).run(train, str(tmp), NAME, EPOCHS, 1, 0.0)
    ours, theirs = (torch.load(each / FINAL, weights_only=True) for each in (folder, tmp))
    assert difference(ours, theirs) <= (0 if len(set(sizes)) == 1 else TOLERANCE)


@pytest.mark.slow
def test_a_killed_rank_is_started_again(start: Any, ranks: Any, tmp_path: Path) -> None:
    agent = start("--standalone", "--nproc-per-node=2")
    kill_a_rank(tmp_path)
    check(tmp_path, agent, [2, 2], ranks, tmp_path / "whole")
    assert "Before that, rank 1 died without an error" in said(tmp_path)


@pytest.mark.slow
def test_the_ranks_that_are_left_go_on_with_the_same_global_batch(start: Any, ranks: Any, tmp_path: Path) -> None:
    """Two agents are two nodes; one of them is lost."""
    meeting = ("--nnodes=1:2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}")
    # How long torchrun waits for more nodes than it needs, and until it believes that one is lost.
    quick = "--rdzv-conf=last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3,is_host="
    stays, goes = start(*meeting, f"{quick}true"), start(*meeting, f"{quick}false")
    kill_a_rank(tmp_path, goes)
    check(tmp_path, stays, [2, 1], ranks, tmp_path / "whole")
    assert f"GlobalBatch: {BATCH} samples a step = batch_size 2 x 1 rank x 2 microsteps" in said(tmp_path)
