"""A watch for hangs: ranks that wait for others which do not come are told where each is, and ended."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_parallel import _lightning, _torch
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.strategies.hang_endings import end_alone, end_together, name_of, write
from lightning_parallel.strategies.hang_words import Standing, hang_words, is_hang, silence_words, slow_words
from lightning_parallel.strategies.processor_time import processor_seconds
from lightning_parallel.strategies.rank_places import PREPARES, SAVES, Place, place_of, progress_of
from lightning_parallel.strategies.store_silence import StoreSilence, Unchanged

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

LONGER = 6
"""Times as long may a rank be still before its first batch: 30 minutes, and not 5. A save takes as long as it takes."""
_PATIENCE = 1.5
"""Times the limit after which a rank that waits for one that computes is told so."""
_POLL = 5.0
_SHORTEST = 0.2
_BUSY = 0.1
"""Share of a processor from which on a process computes; threads of a few groups take a hundredth."""
_SOON = 0.05
_JOIN = 5.0
_VERDICT = "!"


class HangWatch:
    """Looks in a thread where this rank is, and asks the others once it has been there for long.

    Nothing is added to steps. While batches pass, the thread reads some numbers of the trainer every few seconds, and
    looks whether another rank asks.

    Args:
        module: The user's module.
        failures: The watch of other ranks' errors, started.
        rank: This one.
        size: The number of ranks.
        limit: Seconds without a new batch after which a rank that computes nothing is looked at.

    Example:
        >>> watch = HangWatch(module, failures, rank, size, limit=300.0)
        >>> ...  # the run
        >>> watch.stop()
    """

    def __init__(self, module: LightningModule, failures: FailureWatch, rank: int, size: int, *, limit: float) -> None:
        self._module, self._failures, self._rank, self._size, self._limit = module, failures, rank, size, limit
        self._key, self._store = f"{failures.key}/hang", _torch.groups.connected_store()
        self._poll = min(_POLL, max(_SHORTEST, limit / 10))
        self._main = threading.get_ident()
        self._begun = {(each.group, each.number) for each in _torch.flight_recorder.pending()}
        self._last: Place | None = None
        self._moves = Unchanged(self._poll)
        self._still = self._used = 0.0
        self._silent: dict[int, float] = {}
        self._num_asked, self._next = 0, 0.0
        self._answered = ""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="rank-hangs")
        self._thread.start()
        self._silence = StoreSilence(self._store, limit=limit, progress=self._progress, end=self._end_alone)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a strategy watches nobody; threads cannot be copied.
        return type(None), ()

    def stop(self) -> None:
        """Watch no more, and let the others know that this rank is done."""
        self._is_over.set()
        self._silence.stop()
        self._thread.join(_JOIN)
        with contextlib.suppress(RuntimeError):  # rank 0 may be done, and the store gone
            self._store.set(self._name("left", self._rank), "")

    def _name(self, *parts: object) -> str:
        return name_of(self._key, *parts)

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may end with rank 0
            while not self._is_over.wait(self._poll) and not self._failures.has_heard:
                self._moves.look(self._progress())
                # A look takes 0.1 s: torch's flight recorder is read.
                standing = self._look() if self._moves.seconds >= self._limit / 2 else None
                self._answer(standing)
                if standing is not None and standing.is_stuck and time.monotonic() >= self._next:
                    self._ask(standing)

    def _progress(self) -> list[int]:
        """Numbers that change from batch to batch."""
        trainer = _lightning.attached_trainer(self._module)
        return [] if trainer is None else progress_of(trainer)

    def _end_alone(self, seconds: float) -> None:
        """End this rank, which the others cannot be told of."""
        words = silence_words(self._rank, self._place(), seconds, str(self._folder / f"hang_rank{self._rank}.txt"))
        end_alone(self._rank, words, self._folder)

    def _place(self) -> Place:
        return place_of(self._module, self._main, self._begun)

    def _look(self) -> Standing:
        """Where this rank is, and whether it has been there for too long without computing anything."""
        place, last, passed = self._place(), self._last, self._moves.passed
        used, before = processor_seconds(), self._used
        is_same = last is not None and (place.progress, place.collective) == (last.progress, last.collective)
        is_still = is_same and (bool(place.collective) or used - before < _BUSY * passed)
        self._still = self._still + passed if is_still else 0.0
        self._last, self._used = place, used
        is_stuck = self._moves.seconds >= self._allowed(place) and self._still >= self._limit / 2 - self._poll
        return Standing(place, round(self._moves.seconds, 1), is_stuck)

    def _allowed(self, place: Place) -> float:
        if place.collective:
            return self._limit
        if place.doing in (PREPARES, SAVES):
            return math.inf
        return self._limit * (1 if place.has_begun else LONGER)

    def _answer(self, standing: Standing | None) -> None:
        if not self._store.check([self._name("asked")]):
            return
        asked = self._store.get(self._name("asked")).decode()
        if asked.startswith(_VERDICT):
            end = json.loads(asked[1:])
            end_together(self._store, self._key, self._rank, end["ranks"], end["words"], self._folder)
        elif asked not in ("", self._answered):
            self._answered = asked
            self._store.set(self._name(asked, self._rank), json.dumps(standing or self._look()))

    def _ask(self, own: Standing) -> None:
        """Ask all ranks where they are, and decide what that is; one rank asks at a time."""
        self._num_asked += 1
        name, mine = self._name("asked"), f"{self._rank}-{self._num_asked}"
        if self._store.compare_set(name, "", mine).decode() != mine:
            return
        self._next = time.monotonic() + max(self._poll, self._limit / 10)
        standings = self._collected(mine, own)
        if not is_hang(standings):
            self._store.set(name, "")
            if own.seconds >= _PATIENCE * self._limit or all(each.is_stuck for each in standings):
                self._warn(*slow_words(standings, own.seconds))
            return
        answering = [rank for rank, each in enumerate(standings) if each.place is not None]
        words = hang_words(standings, own.seconds, str(self._folder / "hang_rank*.txt"))
        self._store.set(name, _VERDICT + json.dumps({"words": words, "ranks": answering}))
        self._answer(own)

    def _collected(self, mine: str, own: Standing) -> list[Standing]:
        """The answer of each rank; one that has been silent for long is stuck."""
        end, found = time.monotonic() + 3 * self._poll + 1, {self._rank: own}
        while len(found) < self._size and time.monotonic() < end and not self._is_over.wait(_SOON):
            for rank in set(range(self._size)) - set(found):
                if self._store.check([self._name(mine, rank)]):
                    place, *rest = json.loads(self._store.get(self._name(mine, rank)))
                    found[rank] = Standing(Place(*place), *rest)
                elif self._store.check([self._name("left", rank)]):
                    found[rank] = Standing(is_stuck=True, has_left=True)
        now = time.monotonic()
        self._silent = {rank: self._silent.get(rank, now) for rank in range(self._size) if rank not in found}
        return [
            found.get(rank, Standing(is_stuck=now - self._silent.get(rank, now) >= self._limit))
            for rank in range(self._size)
        ]

    def _warn(self, kind: str, words: str) -> None:
        if kind and self._store.add(self._name("warned", kind), 1) == 1:
            write(f"lightning_parallel: {words}")

    @property
    def _folder(self) -> Path:
        trainer = _lightning.attached_trainer(self._module)
        given = "." if trainer is None else str(trainer.default_root_dir)
        return Path("." if "://" in given else given).absolute()
