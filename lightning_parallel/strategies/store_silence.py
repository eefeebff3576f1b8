"""A watch for a store that answers no more: whoever waits for its answer, as other watches do, would learn nothing."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_OFTEN = 20
"""Times that the store is asked within the limit."""
_JOIN = 5.0


class Unchanged:
    """Counts the seconds for which a value has stayed as it is. A machine that was suspended has stood still for none.

    Args:
        poll: Seconds between two looks at the value.
    """

    def __init__(self, poll: float) -> None:
        self._longest, self._value, self._then, self.seconds = 2 * poll, object(), time.monotonic(), 0.0
        self.passed = 0.0
        """Seconds between the last two looks."""

    def look(self, value: Any) -> float:
        """Its value now; returns the seconds."""
        now = time.monotonic()
        self.passed = min(now - self._then, self._longest)
        self.seconds = self.seconds + self.passed if value == self._value else 0.0
        self._value, self._then = value, now
        return self.seconds


class StoreSilence:
    """Calls a function, from a thread, once the store is silent and no batch has passed for long.

    A machine that is cut off sends nothing that would end a connection: torch waits for 30 minutes for an answer of the
    store, whatever its timeout is. So one thread asks it, and another one watches the first.

    Args:
        store: Where ranks meet.
        limit: Seconds.
        progress: Numbers that change from batch to batch, now.
        end: Called with the seconds of silence, and not expected to return.

    Example:
        >>> silence = StoreSilence(store, limit=300.0, progress=progress, end=end)
        >>> ...  # the run
        >>> silence.stop()
    """

    def __init__(
        self, store: dist.Store, *, limit: float, progress: Callable[[], list[int]], end: Callable[[float], None]
    ) -> None:
        self._store, self._limit, self._progress, self._end = store, limit, progress, end
        self._poll, self._num_answers, self._has_ended = limit / _OFTEN, 0, False
        self._is_over = threading.Event()
        self._threads = [
            threading.Thread(target=run, daemon=True, name=f"rank-store-{run.__name__.strip('_')}")
            for run in (self._ask, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._is_over.set()
        for thread in self._threads:
            thread.join(_JOIN)

    def _ask(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store has ended, with rank 0: `lost_store` looks on
            while not self._is_over.wait(self._poll):
                self._store.check(["lightning_parallel/answers"])
                self._num_answers += 1
        self._has_ended = True

    def _watch(self) -> None:
        silence, stillness = Unchanged(self._poll), Unchanged(self._poll)
        while not self._is_over.wait(self._poll) and not self._has_ended:
            seconds = min(silence.look(self._num_answers), stillness.look(self._progress()))
            if seconds >= self._limit:
                self._end(seconds)
                return
