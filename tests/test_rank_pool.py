"""The pool of ranks says which rank failed, how and where."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.rank_pool import MANY_THREADS, RankError, RankPool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path)
    yield pool
    pool.close()


def starts_threads(number: int) -> None:
    for _ in range(number):
        threading.Thread(target=time.sleep, args=(100,), daemon=True).start()


def test_ranks_with_many_threads_are_to_be_started_again(pool: RankPool) -> None:
    assert not pool.is_crowded
    pool.run(starts_threads, MANY_THREADS)
    assert pool.is_crowded


def goes_wrong(how: str) -> int:
    """On rank 1, while rank 0 waits for it."""
    rank = dist.get_rank()
    if how == "mismatch":
        dist.send(torch.zeros(100), 1) if rank == 0 else dist.recv(torch.zeros(10), 0)
    if rank == 1 and how == "raise":
        raise ValueError("wrong")
    if rank == 1 and how == "stand":
        time.sleep(100)
    if rank == 1 and how == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    dist.barrier()
    return rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["rank 1 raised", "ValueError: wrong"]),
        ("stand", ["rank 0 was not done in time", "in barrier", "rank 1 was not done in time", "in goes_wrong"]),
        ("die", ["rank 1 died with exit code -11", "Current thread", "in goes_wrong"]),
        ("mismatch", ["rank 1 died with exit code -6", "gloo::EnforceNotMet"]),  # in a thread of gloo
    ],
)
def test_says_which_rank_failed_and_where(pool: RankPool, how: str, words: list[str]) -> None:
    assert pool.run(goes_wrong, "nothing") == [0, 1]
    with pytest.raises(RankError) as raised:
        pool.run(goes_wrong, how, deadline=5)
    for word in words:
        assert word in str(raised.value)


def about_the_server() -> tuple[int, int, int]:
    from tests import preload

    return preload.PROCESS, preload.THREADS, hash("a name")


def test_ranks_are_forked_before_there_are_threads(ranks: Any) -> None:
    (first, threads, names), (second, other_threads, other_names) = ranks(2).run(about_the_server)
    assert threads == other_threads == 1
    assert first != second  # two servers, which order sets differently
    assert names != other_names or "PYTHONHASHSEED" in os.environ
    assert ranks(2).run(os.getpid) != [first, second]


HANGS = """
from pathlib import Path
import os, sys
from tests import rank_pool, test_rank_pool
pool = rank_pool.RankPool(2, Path(sys.argv[1]))
print(*pool.run(os.getpid), flush=True)
pool.run(test_rank_pool.goes_wrong, "stand")
"""


@pytest.mark.slow
def test_no_rank_is_left_when_the_tests_are_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        left = [int(process) for process in tests.stdout.readline().split()]
        assert len(left) == 2
        tests.kill()
    end = time.monotonic() + 10
    while (left := [process for process in left if Path(f"/proc/{process}").exists()]) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
