"""Ranks that wait for others which do not come: the run ends, and says where each rank is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_parallel import ConfigurationError
from lightning_parallel.strategies.hang_words import Standing, hang_words, is_hang, slow_words
from lightning_parallel.strategies.processor_time import processor_seconds
from lightning_parallel.strategies.rank_places import READS, Place, place_of
from tests.jobs import hangs
from tests.parity import trainer_for
from tests.rank_pool import RankError

ROOT = Path(__file__).parents[2]
WAITS = Standing(
    Place("training, epoch 0, batch 3", [3], True, collective="all_reduce, number 7 of all ranks"), 9, True
)
GATHERS = Standing(
    Place("training, epoch 0, batch 2", [2], True, collective="all_gather, number 7 of all ranks"), 9, True
)
READING = Standing(Place("training, epoch 0, batch 2", [2], True, doing=READS, line="data.py:3"), 9, True)
COMPUTES = READING._replace(is_stuck=False)
assert READING.place is not None
DEBUGGED = READING._replace(place=READING.place._replace(is_debugged=True))


@pytest.mark.parametrize(
    ("case", "strategy", "first", "second", "advice"),
    [
        (
            "gather",
            "ddp_custom",
            r"all_gather of \[3\], number (\d+) of all ranks; training, epoch 0, batch 2: in training_step, at .*hangs",
            r"all_reduce of \[\d+\], number \1 of all ranks; training, epoch 0, batch 2: in backward",
            "that only some ranks run, as behind `if self.global_rank == 0:`",
        ),
        (
            "barrier",
            "fsdp_custom",
            r"barrier, number \d+ of all ranks; training, epoch 0, batch 2: in training_step, at .*hangs.py",
            r"all_gather of \[\d+\], number .*: in training_step in model.blocks.0, at ",
            "that only some ranks run, as behind `if self.global_rank == 0:`",
        ),
        (
            "save",
            "pp_custom",
            r"rank 0 or a checkpoint of all ranks; .*batch 2: in on_train_batch_end, saves .*, at .*hangs.py:",
            r"all_reduce of .*batch 3: in training_step",
            "call trainer.save_checkpoint on all of them",
        ),
        (
            "save",
            "fsdp_custom",
            r"rank 0 or a checkpoint of all ranks; .*batch 2: in on_train_batch_end, saves .*, at .*hangs.py:",
            r"all_gather of .*batch 3: in training_step",
            "call trainer.save_checkpoint on all of them",
        ),
        (
            "data",
            "fsdp_custom",
            r"all_reduce of .*batch 2: outside of hooks, reads data",
            "no other rank; training, epoch 0, batch 2: outside of hooks, reads data, at .*hangs.py:",
            "look at what its dataset reads at that line",
        ),
        (
            "validation",
            "ddp_custom",
            r"barrier, number .* of all ranks; validation, batch 4: ",
            r"no other rank; validation, batch 2: in validation_step, at .*hangs.py:",
            "look at what it does at that line",
        ),
    ],
)
def test_a_hang_ends_and_says_where(ranks: Any, case: str, strategy: str, first: str, second: str, advice: str) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(hangs.run, case, strategy, deadline=60.0)  # a collective waits for 30 minutes
    said = str(caught.value)
    assert said.count("died with exit code 1 ") == 2, said
    assert said.count("this run hangs") == 1, said
    assert re.search(rf"\n  rank 0 waits for {first}.*\n  rank 1 waits for {second}", said), said
    assert advice in said
    stacks = re.findall(r"The stacks are in (.*)/hang_rank\*\.txt", said)[0]
    # Ranks of the pool have folders of their own.
    (stack,) = Path(stacks).glob("hang_rank*.txt")
    assert "most recent call first" in stack.read_text()


def test_a_slow_run_goes_on(ranks: Any) -> None:
    for ending in ranks(2).run(hangs.slow, "one computes", "ddp_custom"):
        assert (ending.step, ending.num_threads) == (5, 0)
        assert all("rank 1 may come" in words for words in ending.said)


def test_ranks_that_all_do_the_same_go_on_and_are_told_once(ranks: Any) -> None:
    endings = ranks(2).run(hangs.slow, "all slow", "fsdp_custom")
    assert [ending[:1] + ending[2:] for ending in endings] == [(5, 0, 0)] * 2
    (words,) = [words for ending in endings for words in ending.said if "none waits for another" in words]
    assert "each of ranks 0, 1 waits for no other rank; training, epoch 0, batch 2: in training_step" in words


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gather", "stops"])
def test_no_process_is_left(tmp_path: Path, case: str) -> None:
    """Under Lightning's launcher; the second rank answers, or has been stopped and cannot."""
    line = [sys.executable, "-m", "tests.jobs.hangs", case, "ddp_custom"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("this run hangs") == 1
    assert "Traceback" not in done.stderr
    assert ("rank 1 does not answer" in done.stderr) is (case == "stops")
    num_written = 1 if case == "stops" else 2
    assert len(list(tmp_path.glob("hang_rank*.txt"))) == num_written
    left = [path for path in Path("/proc").glob("[0-9]*/cwd") if _is(path, tmp_path)]
    assert left in ([], [Path(f"/proc/{os.getpid()}/cwd")])  # this process may be there, too


def _is(path: Path, folder: Path) -> bool:
    try:
        return path.resolve() == folder
    except OSError:  # a process that has ended, or is another user's
        return False


@pytest.mark.parametrize(
    ("standings", "is_one"),
    [
        ([WAITS, GATHERS], True),
        ([WAITS, READING], True),
        ([WAITS, Standing(is_stuck=True)], True),
        ([WAITS, Standing(is_stuck=True, has_left=True)], True),
        ([WAITS, WAITS], False),
        ([READING, READING], False),
        ([WAITS, COMPUTES], False),
        ([WAITS, GATHERS, COMPUTES], False),
        ([WAITS, DEBUGGED], False),
        ([WAITS, Standing()], False),
    ],
)
def test_only_ranks_that_can_never_come_are_a_hang(standings: list[Standing], is_one: bool) -> None:
    assert is_hang(standings) is is_one


def test_words_for_many_ranks() -> None:
    words = hang_words([WAITS, READING, WAITS, Standing(is_stuck=True)], 300.0, "runs/hang_rank*.txt")
    assert "no rank has moved for 300 seconds" in words
    assert "\n  each of ranks 0, 2 waits for all_reduce, number 7 of all ranks; training, epoch 0, batch 3: " in words
    assert (
        "\n  rank 1 waits for no other rank; training, epoch 0, batch 2: outside of hooks, reads data, at data.py:3"
        in words
    )
    assert "\n  rank 3 does not answer" in words
    assert "look at the end of its output" in words


def test_a_debugger_is_no_news() -> None:
    assert slow_words([WAITS, DEBUGGED], 300.0) == ("", "")
    assert slow_words([WAITS, WAITS], 300.0)[1].startswith("all ranks wait for the same")


def test_a_thread_in_a_debugger_is_seen() -> None:
    debugger, goes_on = ModuleType("pdb"), threading.Event()
    exec("def interaction(goes_on):\n    goes_on.wait()", vars(debugger))
    thread = threading.Thread(target=debugger.interaction, args=(goes_on,))
    thread.start()
    try:
        place = place_of(hangs.Hangs(""), thread.ident or 0, set())
    finally:
        goes_on.set()
        thread.join()
    assert place.is_debugged
    assert (place.batch, place.line) == ("set-up", "")  # no line of Python's own modules


def test_processor_time_counts_children() -> None:
    before = processor_seconds()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end = time.monotonic() + 10
        while processor_seconds() - before < 0.3 and time.monotonic() < end:
            time.sleep(0.05)
        assert time.process_time() < processor_seconds() - 0.2
    finally:
        child.kill()
        child.wait()


def test_a_time_below_0_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"hang_timeout=-1\.0 is no time"):
        trainer_for("ddp_custom:hang_timeout=-1", 2)
