"""The ranks of one run: processes of their own, which end together, and within a deadline."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from os import _exit as end_at_once
from pathlib import Path
from typing import Any

from torch import accelerator

from lightning_parallel.errors import ConfigurationError

RAN, REFUSED, ENDED = "ran", "refused", "ended"
_GRACE = 10.0
"""Seconds in which ranks may end by themselves when another one has ended."""
_STOPPED = "the run did not end within {} s"
_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PL_", "OMPI_", "PMI_")
"""Beginnings of variables by which Lightning would take these ranks for those of a launcher around the bench."""


@dataclass(frozen=True)
class Ending:
    """The end of a run.

    Args:
        outcome: ``"ran"``, ``"refused"`` or ``"ended"``.
        reason: Why it did not run, or not to its end.
        ranks: What each rank has handed over, if the run was timed.
        log: What the ranks have printed, if it did not run to its end.
    """

    outcome: str
    reason: str = ""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""


@dataclass(frozen=True)
class Rank:
    """One rank of a run, as its own process sees it.

    Args:
        number: From 0.
        size: The number of ranks.
        folder: For what it hands over.
    """

    number: int
    size: int
    folder: Path

    def hand_over(self, result: Mapping[str, Any]) -> None:
        """Write what was measured; a later call replaces an earlier one."""
        _write(self.folder / f"rank{self.number}.json", result)


def run_ranks(
    work: Callable[..., None], arguments: tuple[Any, ...], num_ranks: int, *, timeout: float, num_threads: int
) -> Ending:
    """``work(rank, *arguments)`` in a process for each rank.

    Without an accelerator, ranks are forked from one process that has imported the module of `work`, and begin within a
    second.

    Args:
        work: A function of a module.
        arguments: What can be pickled.
        num_ranks: The number of ranks.
        timeout: Seconds after which all are ended.
        num_threads: Threads of each rank, for computing on the host.
    """
    with tempfile.TemporaryDirectory(prefix="lightning_parallel_bench_") as temporary:
        folder = Path(temporary)
        context: Any = multiprocessing.get_context(_start_method(work.__module__))
        environment = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "OMP_NUM_THREADS": str(num_threads),
        }
        processes = []
        with _few_threads():
            for number in range(num_ranks):
                rank = Rank(number, num_ranks, folder)
                process = context.Process(target=_begin, args=(work, rank, arguments, environment), daemon=True)
                process.start()
                processes.append(process)
        try:
            is_over = _join(processes, timeout)
            statuses = [process.exitcode for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _ending(folder, statuses, "" if is_over else _STOPPED.format(f"{timeout:g}"))


def _start_method(imported: str) -> str:
    """A fork would inherit a CUDA context that it cannot use, so with an accelerator each rank imports by itself."""
    if accelerator.is_available() or "forkserver" not in multiprocessing.get_all_start_methods():
        return "spawn"
    multiprocessing.set_forkserver_preload([imported])
    return "forkserver"


@contextlib.contextmanager
def _few_threads() -> Iterator[None]:
    """The process that ranks are forked from has to be without threads; it reads the environment when it starts."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def _join(processes: list[Any], timeout: float) -> bool:
    """Wait until all have ended, or until some have and the others do not follow; whether it was within `timeout`."""
    end = time.monotonic() + timeout
    waiting = {process.sentinel: process for process in processes}
    is_late = True
    while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
        for sentinel in ready:
            process = waiting.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                end, is_late = min(end, time.monotonic() + _GRACE), False
    return not waiting or not is_late


def _begin(work: Callable[..., None], rank: Rank, arguments: tuple[Any, ...], environment: Mapping[str, str]) -> None:
    """The life of a rank."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears of it, and ends the ranks
    for name in [name for name in os.environ if name.startswith(_OF_LAUNCHERS)]:
        del os.environ[name]
    own = {"RANK": rank.number, "LOCAL_RANK": rank.number, "WORLD_SIZE": rank.size, "NODE_RANK": 0}
    os.environ.update({**environment, **{name: str(value) for name, value in own.items()}})
    threading.Thread(target=_end_with_command, daemon=True).start()
    sys.argv = sys.argv[:1]
    log = (rank.folder / f"rank{rank.number}.log").open("w")
    sys.stdout.flush()
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    status = 0
    try:
        work(rank, *arguments)
    except BaseException as error:
        status = 1
        is_refused = isinstance(error, ConfigurationError)
        text = str(error) if is_refused else f"{type(error).__name__}: {error}"
        _write(rank.folder / f"error{rank.number}.json", {"refused": is_refused, "text": text, "at": time.time()})
        if not is_refused:
            import traceback

            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    end_at_once(status)  # threads of a group whose other ranks are gone may not end


def _end_with_command() -> None:
    command = multiprocessing.parent_process()
    assert command is not None
    wait([command.sentinel])
    end_at_once(1)


def _ending(folder: Path, statuses: list[int | None], late: str) -> Ending:
    errors = [json.loads(path.read_text()) for path in folder.glob("error*.json")]
    numbers = range(len(statuses))
    paths = [folder / f"rank{number}.json" for number in numbers]
    ranks = [json.loads(path.read_text()) for path in paths if path.exists()]
    logs = [(folder / f"rank{number}.log") for number in numbers]
    log = "".join(f"--- rank {n}\n{path.read_text(errors='replace')}" for n, path in enumerate(logs) if path.exists())
    if any(each["refused"] for each in errors):
        reason = next(each["text"] for each in errors if each["refused"])
        return Ending(REFUSED, reason, log=log)
    if len(ranks) == len(statuses):
        # All is timed: what has ended then was the counting of collectives.
        return Ending(RAN, _first(errors) or late, ranks, log if errors or late else "")
    killed = next((_killed(n, status) for n, status in enumerate(statuses) if status), "")
    return Ending(ENDED, _first(errors) or late or killed or "a rank ended before all steps were timed", log=log)


def _killed(number: int, status: int) -> str:
    if status == -signal.SIGKILL:
        return f"rank {number} was killed, as a system does that is short of memory"
    return f"rank {number} ended with exit status {status}"


def _first(errors: list[dict[str, Any]]) -> str:
    return min(errors, key=lambda each: each["at"])["text"] if errors else ""


def _write(path: Path, value: Mapping[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
