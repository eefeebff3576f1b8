"""The ranks of one run end together, and say why."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_parallel.bench import processes
from lightning_parallel.bench.processes import ENDED, RAN, REFUSED, Ending, run_ranks
from tests.jobs.bench import work

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 1.0)
    monkeypatch.setenv("SLURM_NTASKS", "1")  # as in an interactive job
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the process that ranks are forked from, which imports `work`


def run(*ways: str, timeout: float = 200.0) -> Ending:
    return run_ranks(work, (list(ways),), len(ways), timeout=timeout, num_threads=1)


def test_all_ranks_run() -> None:
    ending = run("runs", "runs")
    assert (ending.outcome, ending.reason, ending.log) == (RAN, "", "")
    assert ending.ranks == [{"number": 0}, {"number": 1}]


@pytest.mark.parametrize(
    ("ways", "outcome", "reason"),
    [
        (["refuses", "refuses"], REFUSED, "3 ranks are too many; give 2"),
        (["raises", "hangs"], ENDED, "ValueError: no such sample"),
        (["hangs", "dies"], ENDED, "rank 1 ended with exit status 7"),
        (["runs", "dies"], ENDED, "rank 1 ended with exit status 7"),
        (["counts wrong"], RAN, "RuntimeError: a mode is on"),
    ],
)
def test_an_end_of_one_rank_ends_the_run(ways: list[str], outcome: str, reason: str) -> None:
    start = time.monotonic()
    ending = run(*ways)
    assert (ending.outcome, ending.reason) == (outcome, reason)
    assert "--- rank 0\nrank 0 is here" in ending.log
    assert time.monotonic() - start < 150  # and not when the time of a run is over


def test_a_run_has_a_deadline() -> None:
    ending = run("runs", "hangs", timeout=3.0)
    assert (ending.outcome, ending.reason) == (ENDED, "the run did not end within 3 s")
