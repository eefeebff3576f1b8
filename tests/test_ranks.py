"""The pool of ranks says which rank failed, how and where."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, RankPool


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path)
    yield pool
    pool.close()


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
