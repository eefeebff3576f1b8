"""Ranks on the same machine, whose processes can be seen to be gone."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_PROCESSES = Path("/proc")
_NEAR = 16
"""Ranks of a machine follow each other: of a thousand ranks, each asks the store for a few only."""


class Neighbours:
    """Tells which other rank on this machine has gone without a word, as after SIGKILL. Elsewhere than on Linux, none.

    Args:
        store: In which ranks leave notes for each other.
        key: Beginning of their names.
        rank: This one.
        size: The number of ranks.
    """

    def __init__(self, store: dist.Store, key: str, rank: int, size: int) -> None:
        self._store, self._key, self._rank = store, key, rank
        self._own = identity(os.getpid())
        near = range(max(0, rank - _NEAR), min(size, rank + _NEAR + 1))
        self._unread = [other for other in near if other != rank]
        self._processes: dict[int, tuple[int, str]] = {}
        self._looks = threading.Lock()  # a thread looks now and then, and the main one when it has failed
        store.set(f"{key}/process/{rank}", self._own)

    def gone(self) -> list[tuple[int, int]]:
        """Ranks that are gone and have not taken leave, and the ids of their processes.

        Raises:
            RuntimeError: If the store is gone, with rank 0.
        """
        with self._looks:
            self._read()
            gone = [(rank, pid) for rank, (pid, known) in self._processes.items() if identity(pid) != known]
            for rank, _ in gone:
                if self._store.check([f"{self._key}/left/{rank}"]):
                    del self._processes[rank]
            return [(rank, pid) for rank, pid in gone if rank in self._processes]

    def is_running(self, rank: int) -> bool | None:
        """Whether the process of `rank` runs; ``None`` if nobody knows, as where it is on another machine.

        Args:
            rank: The rank.
        """
        with self._looks:
            pid, known = self._processes.get(rank, (0, ""))
            return identity(pid) == known if known else None

    def leave(self) -> None:
        """Say that this rank may be gone from now on."""
        self._store.set(f"{self._key}/left/{self._rank}", "1")

    def _read(self) -> None:
        """Take up what ranks have said since of their processes, as far as these are on this machine."""
        machine = self._own.rpartition(" ")[0].rpartition(" ")[0]
        for rank in list(self._unread):
            if self._store.check([name := f"{self._key}/process/{rank}"]):
                self._unread.remove(rank)
                known = self._store.get(name).decode()
                if machine and known.startswith(f"{machine} "):
                    self._processes[rank] = int(known.split()[-2]), known


def identity(pid: int) -> str:
    """The machine, the number of a process that runs on it, and when it was started; "" if it does not run.

    Args:
        pid: Its number.
    """
    try:
        # Containers on one machine count their processes apart.
        started = (_PROCESSES / "sys/kernel/random/boot_id").read_text().strip()
        machine = f"{started} {(_PROCESSES / 'self/ns/pid').readlink()}"
        # The name of a program, which comes first and in parentheses, may have spaces in it.
        state, *rest = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else f"{machine} {pid} {rest[18]}"
