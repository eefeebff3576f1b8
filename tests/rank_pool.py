"""A pool of ranks, started once a session: real processes with a gloo group, a deadline, and a stack when it passes.

Ranks are forked from servers that have imported everything, so that a pool is there in a second. There are two servers:
neighbouring ranks then order sets of strings and of objects differently, as processes do that start by themselves.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

DEADLINE = 120.0
"""Seconds that a job may take; a rank that is not done by then is reported with its stack. Jobs take a few seconds."""
STARTING = 300.0
"""Seconds within which ranks have to be there: the first ones wait for the servers, which import torch meanwhile."""
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
"""What servers and ranks have in their environment. A server with threads could not be forked."""
MANY_THREADS = 40
"""Threads of a rank from which on it is better to start again: each gloo group looks for work 100 times a second, and a
session makes groups of all shapes."""
IDLE = 20.0
"""Seconds without a job from which on it is better to start again, for the same reason."""
WRITING = 5.0
"""Seconds that a rank has for writing down where it stands, and others for noticing that one has died."""


_SERVERS = (forkserver.ForkServer(), forkserver.ForkServer())


def start_servers() -> None:
    """Let the servers import what ranks need, while tests without ranks run."""
    with mock.patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}):
        for server in _SERVERS:
            server.set_forkserver_preload(["tests.preload"])
            server.ensure_running()


class RankError(AssertionError):
    """A job failed on some ranks; the message has each rank's traceback."""


class RankPool:
    """`size` processes in which functions run side by side.

    Args:
        size: The number of ranks.
        folder: Where ranks work and write their stacks.

    Example:
        >>> RankPool(2, tmp_path).run(function, argument)  # a list: the result of each rank
    """

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        context = multiprocessing.get_context("forkserver")
        port = free_port()
        start_servers()  # again if one is gone
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = forked(rank, _serve, rank, size, port, theirs, str(folder))
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.run(os.getpid, deadline=STARTING)

    def run(self, function: Callable[..., Any], *args: Any, deadline: float = DEADLINE, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank; returns the results in order of rank.

        Raises:
            RankError: With the stack of each rank that died or was not done in time, and the traceback of each that
                raised: in this order, since ranks also raise when another one is gone.
        """
        self._last = time.monotonic()
        job = pickle.dumps((function, args, kwargs, deadline))
        for connection in self._connections:
            connection.send_bytes(job)
        failures, results = [], [None] * self.size
        waiting = dict(enumerate(self._connections))
        end = time.monotonic() + deadline + WRITING
        while waiting and (ready := wait(waiting.values(), max(0.0, end - time.monotonic()))):
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    error, results[rank] = pickle.loads(waiting.pop(rank).recv_bytes())
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(WRITING)
                    error = f"died with exit code {self._processes[rank].exitcode} at\n{self._stack(rank)}"
                    end = min(end, time.monotonic() + WRITING)  # others may wait for it in vain
                if error:
                    failures.append(f"rank {rank} {error}")
        failures += [f"rank {rank} was not done in time and stands at\n{self._stack(rank)}" for rank in waiting]
        if any(" raised\n" not in failure for failure in failures):
            self.close()
        if failures:
            raise RankError("\n".join(sorted(failures, key=lambda failure: " raised\n" in failure)))
        return results

    def _stack(self, rank: int) -> str:
        return (self._folder / f"stack-{rank}").read_text() or "(no stack was written)"

    @property
    def is_alive(self) -> bool:
        """Whether all ranks can take a job."""
        return all(process.is_alive() for process in self._processes)

    @property
    def is_crowded(self) -> bool:
        """Whether the groups of earlier jobs take much of the machine's time."""
        tasks = Path(f"/proc/{self._processes[0].pid}/task")
        return tasks.exists() and len(list(tasks.iterdir())) > MANY_THREADS

    @property
    def is_idle(self) -> bool:
        """Whether no job has come for a while."""
        return time.monotonic() - self._last > IDLE

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def forked(rank: int, target: Callable[..., None], *args: Any) -> Any:
    """A process that runs a function and was forked from the server of that rank, which has imported everything."""
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args, daemon=True)
    server = _SERVERS[rank % len(_SERVERS)]
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()
    return process


def free_port() -> int:
    """A port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _end_with_tests() -> None:
    """End this rank when the process of the tests is gone, whatever it does or waits for."""
    tests = multiprocessing.parent_process()
    assert tests is not None
    wait([tests.sentinel])
    os._exit(1)


def _serve(rank: int, size: int, port: int, connection: Connection, folder: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(size),
        **ENVIRONMENT,
    )
    threading.Thread(target=_end_with_tests, daemon=True).start()
    os.chdir(tempfile.mkdtemp(dir=folder))
    stack = Path(folder, f"stack-{rank}").open("a")  # noqa: SIM115 - open as long as the process lives
    os.dup2(stack.fileno(), 2)  # what torch or the C library say before they end a process

    import torch
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    from tests.compiler import keep_to_graphs
    from tests.quiet import look_for_plugins_once, silence

    def teardown(self: _SignalConnector) -> None:
        """Put the handlers of signals back to what Python knows of, which is not what writes stacks."""
        put_back(self)
        faulthandler.disable()
        faulthandler.enable(stack)

    put_back, _SignalConnector.teardown = _SignalConnector.teardown, teardown  # type: ignore[method-assign]
    faulthandler.enable(stack)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)
    silence()
    look_for_plugins_once()
    keep_to_graphs()
    while True:
        try:
            function, args, kwargs, deadline = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.truncate(stack.fileno(), 0)
        faulthandler.dump_traceback_later(deadline, file=stack)
        try:
            answer = ("", function(*args, **kwargs))
        except BaseException:
            answer = (f"raised\n{traceback.format_exc()}", None)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(answer))
