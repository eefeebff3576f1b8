"""Whether a run that is killed again and again, at any moment, ends as the one that never was.

    python -m tests.stress_kills 50 fsdp_custom
    python -m tests.stress_kills 50 fsdp_custom:checkpoint=sharded --seed 1

Two ranks train a small GPT on shuffled samples, and save every two steps. SIGKILL
comes to one of them or to both: a third of the times inside of a save, else at any moment from the start of the
processes on. The rest is ended as torchrun does, by SIGTERM, and the run goes on with ``ckpt_path="last"``.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_parallel.checkpoint.whole_file import PARTIAL
from tests.jobs.killed import FINAL, NUM_SAMPLES, SAVED, STEPS, history, notes, train
from tests.rank_pool import ENVIRONMENT, forked, free_port, start_servers

DEADLINE = 60.0
"""Seconds within which processes are gone, or do the next thing."""
BALLAST = 2_000_000
"""Numbers in each checkpoint: it takes some 30 ms to write."""
PROGRESS = 4
"""Steps that a run comes forward between two kills, at most and on the average of those at any moment."""


@dataclass
class Report:
    """What has happened.

    Args:
        kinds: Where the run was killed -> how often.
        endings: Seconds from each kill to the end of the last process.
        problems: What is wrong; empty if nothing is.
        num_reads: Steps that were run by all attempts together.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    endings: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    num_reads: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        slowest = max(self.endings, default=0.0)
        return (
            f"{sum(self.kinds.values())} kills ({kinds}); {self.num_reads} steps run; all processes gone within "
            f"{slowest:.1f} s; {'; '.join(self.problems) or 'parameters and samples as without'}"
        )


class Attempt:
    """Two ranks that train in `folder`."""

    def __init__(self, folder: Path, *args: Any) -> None:
        self._saved = folder / SAVED
        self._left = set(self._saved.glob(PARTIAL))  # by an earlier attempt, until the next save
        port = free_port()
        self._ranks = [forked(rank, _train, rank, port, str(folder), *args) for rank in range(2)]

    def is_over(self) -> bool:
        """Whether a rank has ended."""
        return any(rank.exitcode is not None for rank in self._ranks)

    def is_saving(self) -> bool:
        """Whether a checkpoint is half written."""
        return any(each not in self._left for each in self._saved.glob(PARTIAL))

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until it holds or a rank has ended.

        Raises:
            TimeoutError: After a while.
        """
        end = time.monotonic() + DEADLINE
        while not self.is_over() and not condition():
            if time.monotonic() > end:
                raise TimeoutError("ranks do not come forward")
            time.sleep(0.0005)

    def kill(self, ranks: list[int]) -> None:
        """Send SIGKILL to some ranks."""
        for rank in ranks:
            os.kill(self._ranks[rank].pid, signal.SIGKILL)
        for rank in ranks:
            self._ranks[rank].join(DEADLINE)

    def end(self) -> float:
        """End the ranks that are left as a launcher does that has seen one end, and return the seconds until then."""
        began = time.monotonic()
        for rank in self._ranks:
            rank.terminate()
        return self.join(began)

    def join(self, began: float) -> float:
        """Wait for all ranks; those that do not end in time are killed."""
        for rank in self._ranks:
            rank.join(max(0.0, began + DEADLINE - time.monotonic()))
        taken = time.monotonic() - began
        self.kill([index for index, rank in enumerate(self._ranks) if rank.exitcode is None])
        return taken

    @property
    def statuses(self) -> list[int]:
        """Exit statuses."""
        return [rank.exitcode for rank in self._ranks]


def _train(rank: int, port: int, folder: str, *args: Any) -> None:
    ends = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "NODE_RANK": "0", "WORLD_SIZE": "2"}
    os.environ.update(ENVIRONMENT, LOCAL_RANK=str(rank), **ends)
    said = (Path(folder) / f"said-{rank}").open("a")
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    torch.set_num_threads(1)
    train(folder, *args)


class Killer:
    """Kills runs in `folder`, and compares the last one with a run that nobody has killed.

    Args:
        folder: An empty one.
        name: Of a strategy, with options.
        count: How often.
        seed: Of the moments.
    """

    def __init__(self, folder: Path, name: str, count: int, seed: int) -> None:
        epochs = -(-count * PROGRESS // STEPS) + 1
        self._arguments = name, epochs, BALLAST, 0.0
        self._whole, self._killed = folder / "whole", folder / "killed"
        for each in (self._whole, self._killed):
            each.mkdir()
        self._count, self._epochs, self._random = count, epochs, random.Random(seed)
        self._starting = 1.0
        self.report = Report()

    def run(self) -> Report:
        """Do it."""
        self._finish(self._whole)
        while sum(self.report.kinds.values()) < self._count and not self.report.problems:
            self._kill_one()
        if not self.report.problems:
            self._finish(self._killed)
        if not self.report.problems:
            self._compare()
        return self.report

    def _finish(self, folder: Path) -> None:
        attempt, began = Attempt(folder, *self._arguments), time.monotonic()
        attempt.wait(lambda: bool(notes(folder, "start")))
        self._starting = time.monotonic() - began
        attempt.join(time.monotonic() + 4 * DEADLINE)
        if attempt.statuses != [0, 0]:
            self.report.problems.append(f"a run that nobody has killed ended with {attempt.statuses}: {_said(folder)}")

    def _kill_one(self) -> None:
        kinds, draw = self.report.kinds, self._random
        wants_save = 3 * kinds["in a save"] < sum(kinds.values()) + 1
        attempt = Attempt(self._killed, *self._arguments)
        if wants_save:
            for _ in range(draw.randint(1, 2)):
                attempt.wait(lambda: not attempt.is_saving())
                attempt.wait(attempt.is_saving)
            time.sleep(draw.uniform(0, 0.02))
        elif draw.random() < 0.3:
            time.sleep(draw.uniform(0, self._starting))
        else:
            self._wait_for_steps(attempt, draw.uniform(0, 2 * PROGRESS))
        if attempt.is_over():
            self.report.problems.append(f"it ended by itself with {attempt.statuses}: {_said(self._killed)}")
        attempt.kill(draw.choice([[0], [1], [0, 1]]))
        kind = "in a save" if attempt.is_saving() else "in a step" if self._has_started() else "at the start"
        kinds[kind] += 1
        self.report.endings.append(attempt.end())
        if self.report.endings[-1] > DEADLINE:
            self.report.problems.append(f"a rank was left after {DEADLINE} s, killed {kind}: {_said(self._killed)}")
        self._num_started = len(notes(self._killed, "start"))

    _num_started = 0

    def _has_started(self) -> bool:
        return len(notes(self._killed, "start")) > self._num_started

    def _wait_for_steps(self, attempt: Attempt, steps: float) -> None:
        """Wait until some steps have been run, the last of them in part."""
        attempt.wait(self._has_started)
        before = len(notes(self._killed, "read"))
        attempt.wait(lambda: len(notes(self._killed, "read")) >= before + 2 * int(steps))
        time.sleep(steps % 1 * 0.02)

    def _compare(self) -> None:
        problems = self.report.problems
        ours, theirs = (torch.load(folder / FINAL, weights_only=True) for folder in (self._killed, self._whole))
        differing = [key for key in theirs if not torch.equal(ours[key], theirs[key])]
        if differing or set(ours) != set(theirs):
            problems.append(f"{len(differing)} of {len(theirs)} tensors differ")
        wanted = {epoch: Counter(range(NUM_SAMPLES)) for epoch in range(self._epochs)}
        read = history(self._killed)
        wrong = [epoch for epoch in wanted.keys() | read.keys() if wanted.get(epoch) != read.get(epoch)]
        if wrong:
            problems.append(f"samples read twice or missed in epochs {wrong}")
        if left := sorted(each.name for each in (self._killed / SAVED).glob(".*")):
            problems.append(f"left behind: {left}")
        self.report.num_reads = len(notes(self._killed, "read")) // 2


def _said(folder: Path) -> str:
    return "".join(f"\n{path.name}: {path.read_text()[-3000:]}" for path in sorted(folder.glob("said-*")))


def main() -> None:
    """Kill, and say how it ended; the exit status is 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("count", type=int)
    parser.add_argument("strategy")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    start_servers()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Killer(Path(folder), given.strategy, given.count, given.seed).run()
    print(f"{given.strategy}: {report}; {time.monotonic() - began:.0f} s")
    sys.exit(bool(report.problems))


if __name__ == "__main__":
    main()
