"""An error on one rank ends the others, which would wait in a collective until it times out."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from os import _exit as end_at_once
from typing import TYPE_CHECKING

import torch.distributed as dist

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.strategies.lost_store import waits_in_vain
from lightning_parallel.strategies.neighbours import Neighbours
from lightning_parallel.strategies.stillness import LONG_ENOUGH, Stillness

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy

POLL = 1.0
"""Seconds between two looks for errors of other ranks."""
GRACE = 30.0
"""Seconds in which a rank that computes or saves may notice by itself that another one has failed, before its process
ends; one that stands still has `stillness.LONG_ENOUGH`."""
GRACE_OF_DEAD = 10.0
"""Seconds in which a rank may notice by itself that the process of another one is gone. Launchers kill after 30."""
_LONGER = 10
"""Times as long waits a rank without the store for rank 0 that runs: it may save."""
_READ = 5.0
"""Seconds that rank 0, which keeps the store, waits for others to read why it ends."""
_OF_DEATH = 1.0
"""Seconds in which a process ends whose connections are closed: the system does so first."""
_LOOK = 0.5
"""Seconds between two looks whether a rank stands still."""
_SHORTEST = 0.001
_LONGEST = 500
_NOTED = "_lightning_parallel_first_failure"


@dataclass(frozen=True)
class FirstFailure:
    """The error that came first of those of all ranks.

    Args:
        text: The rank, and what it raised.
        is_here: Whether it was this rank.
    """

    text: str
    is_here: bool

    def says(self, exception: BaseException) -> bool:
        """Whether it is in the words of `exception`, too."""
        return _words(exception) in self.text


def first_failure(exception: BaseException) -> FirstFailure | None:
    """The first error of all ranks, which ends this one with `exception`; ``None`` if no other ranks were there."""
    found: FirstFailure | None = vars(exception).get(_NOTED)
    return found


class FailureWatch:
    """Tells the other ranks of an error here, and ends this process after an error elsewhere; from `start` to `stop`.

    Nothing wakes a thread that waits in a collective for a rank that is not going to come. A rank that has no error of
    its own a while after one elsewhere ends with exit status 1 and a line that names the rank and its error.
    """

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._rank = self._size = self._num_said = 0
        self.key = ""
        """A name that all ranks share and no other run has."""
        self._first: str | None = None
        self._neighbours: Neighbours | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple[type[FailureWatch], tuple[()]]:
        # A copy, in another process or for another fit, watches nobody yet; locks and connections cannot be copied.
        return type(self), ()

    def start(self, strategy: ParallelStrategy) -> None:
        """Watch the other ranks of `strategy`, whose process group is there. A collective."""
        if strategy.world_size == 1:
            return
        self._rank, self._size = strategy.global_rank, strategy.world_size
        # A key of this run: a process may fit again after an error that it has caught.
        self.key = f"lightning_parallel/{strategy.broadcast(f'{os.getpid()}-{time.monotonic_ns()}')}"
        self._store, self._first, self._num_said = _torch.groups.connected_store(), None, 0
        self._neighbours = Neighbours(self._store, self.key, self._rank, self._size)
        self._is_over = threading.Event()
        watched = self._store, self._is_over, threading.get_ident(), time.time_ns()
        self._thread = threading.Thread(target=self._watch, args=watched, daemon=True, name="rank-failures")
        self._thread.start()

    def report(self, exception: BaseException) -> None:
        """Tell the other ranks of `exception`; where another one has failed before, note that in it."""
        if self._store is None:
            return
        self._is_over.set()
        words = _words(exception)
        own = f"rank {self._rank} raised {words}"
        with _store_may_be_gone():
            num_dead = 0
            if not self.has_heard:  # else rank 0 may be gone, and the store with it
                num_dead = self._note_dead(_OF_DEATH if _is_of_connection(exception) else 0.0)
            first = self._first or self._read(self._store, self._store.compare_set(self.key, "", own))
            vars(exception)[_NOTED] = FirstFailure(first, is_here=first == own)
            # What all ranks raise alike needs no note, nor what all of them are refused for.
            if first != own and words not in first and not isinstance(exception, ConfigurationError):
                exception.add_note(f"Before that, {first}")
            if (first == own or num_dead) and self._rank == 0:
                self._wait_for_readers(self._store, self._size - 1 - num_dead)

    @property
    def has_heard(self) -> bool:
        """Whether a rank has failed, as this one knows: the store may end with rank 0 at any moment then."""
        return self._first is not None

    def end(self, reason: str) -> None:
        """End this process, from another thread than one that waits in a collective, and tell the other ranks why.

        Args:
            reason: A sentence.
        """
        with _store_may_be_gone():
            _torch.groups.connected_store().compare_set(self.key, "", reason)
        _end(reason)

    def say(self, words: str, name: str = "") -> str | None:
        """The words of rank 0, on all ranks: they wait for it as long as it takes. A collective.

        Nothing of the process group waits, so that no timeout ends it. If a rank fails meanwhile, this process ends.

        Args:
            words: Of rank 0; those of others are not used.
            name: The same on all ranks and used once, where other threads than the main one say something.

        Returns:
            ``None`` if nobody watches the ranks, as before and after a run.
        """
        if self._store is None:
            return None
        name = f"{self.key}/said/{name or self.new_name()}"
        if self._rank == 0:
            self._store.set(name, words)
            return words
        _wait(self._store, [name])
        return self._store.get(name).decode()

    def hear(self, own: bytes, name: str = "") -> list[bytes] | None:
        """The words of each rank on rank 0, which waits for all as long as it takes. A collective, as `say` is.

        Args:
            own: This rank's words.
            name: As that of `say`.

        Returns:
            Nothing on other ranks; ``None`` if nobody watches the ranks.
        """
        if self._store is None:
            return None
        name = name or self.new_name()
        names = [f"{self.key}/heard/{name}/{rank}" for rank in range(self._size)]
        self._store.set(names[self._rank], own)  # type: ignore[arg-type] # it takes bytes, too
        if self._rank != 0:
            return []
        _wait(self._store, names)
        return [self._store.get(name) for name in names]

    def meet(self) -> None:
        """Wait until all ranks have come here, as long as it takes, where the ranks are watched. A collective."""
        if self._store is not None:
            self.hear(b"")
            self.say("")

    @property
    def is_on(self) -> bool:
        """Whether the ranks are watched now."""
        return self._store is not None

    def new_name(self) -> str:
        """A name that all ranks get that call this as often. Call it in the main thread."""
        self._num_said += 1
        return str(self._num_said)

    def agreed_step(self, name: str, step: int | None) -> int | None:
        """The step at which all ranks do something of which they hear at different times; ``None`` if nobody has heard.

        Args:
            name: Of that.
            step: The present one, if this rank has heard of it. Another rank may be one step ahead or behind.
        """
        if self._store is None:
            return step
        entry = f"{self.key}/step/{name}"
        if step is not None:
            return int(self._store.compare_set(entry, "", str(step + 2)))
        return int(self._store.get(entry)) if self._store.check([entry]) else None

    def stop(self) -> None:
        """Watch no more."""
        self._is_over.set()
        if self._neighbours is not None and not self.has_heard:
            with _store_may_be_gone():
                self._neighbours.leave()
        if self._thread is not None:
            # Python cannot end a thread that is in C++ when the process does: the process would abort.
            self._thread.join(_READ)
        self._store = self._thread = self._neighbours = None

    def _read(self, store: dist.Store, first: bytes) -> str:
        """The first error in words; this rank counts as one that knows."""
        if self._first is None:
            self._first = first.decode()
            if not self._first.startswith(f"rank {self._rank} "):
                store.add(f"{self.key}/read", 1)
        return self._first

    def _wait_for_readers(self, store: dist.Store, count: int) -> None:
        end = time.monotonic() + _READ
        while store.add(f"{self.key}/read", 0) < count and time.monotonic() < end:
            time.sleep(0.05)

    def _watch(self, store: dist.Store, is_over: threading.Event, main: int, since: int) -> None:
        with _store_may_be_gone():
            while not is_over.wait(POLL):
                num_dead = self._note_dead()
                if store.check([self.key]):
                    first = self._read(store, store.get(self.key))
                    end, stillness = time.monotonic() + (GRACE_OF_DEAD if num_dead else GRACE), Stillness(main)
                    while time.monotonic() < end and not stillness.has_lasted(LONG_ENOUGH):
                        if is_over.wait(min(_LOOK, GRACE_OF_DEAD, GRACE)):
                            return
                    if not is_over.is_set():
                        _end(f"{first}. Rank {self._rank} waits for it in vain, and ends.")
                    return
        if (name := waits_in_vain(is_over, main, since, self._patience)) is not None:
            _end(_LOST.format(rank=self._rank, name=name))

    def _patience(self) -> float:
        """Seconds in which a rank may notice by itself that rank 0, which may have kept the store, is gone."""
        is_running = None if self._neighbours is None else self._neighbours.is_running(0)
        return {None: GRACE, True: _LONGER * GRACE, False: GRACE_OF_DEAD}[is_running]

    def _note_dead(self, seconds: float = 0.0) -> int:
        """Tell all ranks of those on this machine that are gone; returns how many, as soon as there are any."""
        end = time.monotonic() + seconds
        neighbours, store = self._neighbours, self._store
        if neighbours is None or store is None:
            return 0
        while not (gone := neighbours.gone()) and time.monotonic() < end:
            time.sleep(_SHORTEST)
        if gone:
            store.compare_set(self.key, "", _DIED.format(*gone[0]))
        return len(gone)


def _wait(store: dist.Store, names: list[str]) -> None:
    """Wait for entries of a store, without its timeout."""
    began = time.monotonic()
    while not store.check(names):
        # A small part of what has been waited for already, so that little is added to it.
        time.sleep(min(max(_SHORTEST, (time.monotonic() - began) / 50), POLL))


_LOST = (
    "the store in which ranks meet is gone, and with it the process that has kept it: rank 0, or torchrun on its "
    "machine. What these wrote last says why. Rank {rank} waits in vain in {name}, and ends."
)
_DIED = "rank {} died without an error (process {}): it was killed from outside, as when memory runs out, or it crashed"


def _is_of_connection(exception: BaseException) -> bool:
    """Whether it says that another process may be gone, in the words of gloo or NCCL."""
    said = str(exception).lower()
    return isinstance(exception, RuntimeError) and ("connection" in said or "remote process" in said)


def _words(exception: BaseException) -> str:
    return f"{type(exception).__name__}: {exception}".strip()[:_LONGEST]


@contextlib.contextmanager
def _store_may_be_gone() -> Iterator[None]:
    """Inside this context, a store that has ended with rank 0 is no error: that rank may have been done."""
    with contextlib.suppress(RuntimeError):
        yield


def _end(why: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"\n{why}\n")
    sys.stderr.flush()
    end_at_once(1)  # not `sys.exit`, which ends this thread, and waits for the other one
