"""The pool of ranks says which rank failed, how and where, and gets over crashes of torch's own threads."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import MOST_CRASHES, Crashes, RankError, RankPool


@pytest.fixture
def crashes(monkeypatch: pytest.MonkeyPatch) -> Crashes:
    """Those of a test, which are none of the session's."""
    crashes = Crashes()
    monkeypatch.setattr("tests.ranks.CRASHES", crashes)
    return crashes


@pytest.fixture
def pool(tmp_path: Path, crashes: Crashes) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path)
    yield pool
    pool.close()


def goes_wrong(how: str, marker: str) -> int:
    """On rank 1, while rank 0 waits for it."""
    rank = dist.get_rank()
    if how == "mismatch":
        dist.send(torch.zeros(100), 1) if rank == 0 else dist.recv(torch.zeros(10), 0)
    if rank == 1 and how != "nothing" and not (how == "once" and Path(marker).exists()):
        Path(marker).touch()
        if how == "raise":
            raise ValueError("wrong")
        if how == "stand":
            time.sleep(100)
        if how == "python":
            os.kill(os.getpid(), signal.SIGSEGV)
        # In a thread that Python knows nothing of, as gloo's are: one that begins nowhere.
        thread = ctypes.c_ulong()
        ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, None, None)
        threading.Event().wait()
    dist.barrier()
    return rank


@pytest.mark.parametrize(
    ("how", "words", "num_crashes"),
    [
        ("raise", ["rank 1 raised", "ValueError: wrong"], 0),
        ("stand", ["rank 0 was not done in time", "in barrier", "rank 1 was not done in time", "in goes_wrong"], 0),
        ("python", ["rank 1 died with exit code -11", "Current thread", "in goes_wrong"], 0),
        ("mismatch", ["rank 1 died with exit code -6", "gloo::EnforceNotMet"], 0),
        ("always", ["rank 1 died with exit code -11"], 1),
    ],
)
def test_says_which_rank_failed_and_where(
    pool: RankPool, crashes: Crashes, tmp_path: Path, how: str, words: list[str], num_crashes: int
) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(goes_wrong, how, str(tmp_path / "marker"), deadline=10)
    for word in words:
        assert word in str(raised.value)
    assert len(crashes) == num_crashes


def test_a_crash_of_a_thread_of_torch_is_run_again(pool: RankPool, crashes: Crashes, tmp_path: Path) -> None:
    assert pool.run(goes_wrong, "once", str(tmp_path / "marker")) == [0, 1]
    assert len(crashes) == 1
    assert "goes_wrong" in crashes[0]
    assert "rank 1 died with exit code -11" in crashes[0]
    assert pool.run(goes_wrong, "nothing", "") == [0, 1]


def test_only_the_first_few_are(crashes: Crashes) -> None:
    failure = (
        "rank 0 died with exit code -6 at\nmalloc(): unaligned tcache chunk detected\nFatal Python error: Aborted\n"
    )
    taken = [crashes.take("job", [failure]) for _ in range(MOST_CRASHES + 1)]
    assert taken == [True] * MOST_CRASHES + [False]
    assert not Crashes().take("job", [failure.replace("malloc(): ", "")])
    assert not Crashes().take("job", [f"{failure}Current thread 0x1"])
