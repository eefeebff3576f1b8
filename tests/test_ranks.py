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
import torch.distributed as dist

from tests.ranks import Crashes, RankError, RankPool


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
    if dist.get_rank() == 1 and how != "nothing" and not (how == "once" and Path(marker).exists()):
        Path(marker).touch()
        if how == "raise":
            raise ValueError("wrong")
        if how == "stand":
            time.sleep(100)
        if how == "python":
            os.kill(os.getpid(), signal.SIGSEGV)
        # In a thread that Python knows nothing of, as gloo's are.
        thread, code = ctypes.c_ulong(), ctypes.CDLL(None)
        code.pthread_create(ctypes.byref(thread), None, ctypes.cast(code.abort, ctypes.c_void_p), None)
        threading.Event().wait()
    dist.barrier()
    return dist.get_rank()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raise", ["rank 1 raised", "ValueError: wrong"]),
        ("stand", ["rank 0 was not done in time", "in barrier", "rank 1 was not done in time", "in goes_wrong"]),
        ("python", ["rank 1 died with exit code -11", "Current thread", "in goes_wrong"]),
        ("always", ["rank 1 died with exit code -6"]),
    ],
)
def test_says_which_rank_failed_and_where(pool: RankPool, tmp_path: Path, how: str, words: list[str]) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(goes_wrong, how, str(tmp_path / "marker"), deadline=10)
    for word in words:
        assert word in str(raised.value)


def test_a_crash_of_a_thread_of_torch_is_run_again(pool: RankPool, crashes: Crashes, tmp_path: Path) -> None:
    assert pool.run(goes_wrong, "once", str(tmp_path / "marker")) == [0, 1]
    assert len(crashes) == 1
    assert "goes_wrong" in crashes[0]
    assert "rank 1 died with exit code -6" in crashes[0]
    assert pool.run(goes_wrong, "nothing", "") == [0, 1]
