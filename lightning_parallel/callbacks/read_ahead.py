"""Items of an iterator, read by a thread while the main thread computes: the same ones in the same order."""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

_PATIENCE = 10.0
"""Seconds for which the end of a fit waits for an item that is being read."""
_NOTE = "It was raised in the thread in which DevicePrefetch reads batches ahead."


class Ended(BaseException):
    """Leaves what the thread reads; no `Exception`, so that no code of users takes it for an error."""


class Watch(Protocol):
    """Looks at what both threads share."""

    def look(self) -> bool:
        """Whether it has changed since the last look; it has not where this is the first."""

    def tell(self, *, has_read: bool) -> None:
        """Take it that what has changed was changed by the main thread.

        Args:
            has_read: Whether the thread has read meanwhile, and may have done it.
        """


class ReadAhead(Iterator[Any]):
    """An iterator whose next items are read by a thread, until `close`.

    What the thread reads may take its turn: wait until the main thread waits for this very item, so that nothing else
    goes on. Then all is as if the main thread had read it.

    Args:
        inner: The iterator.
        ahead: Items that may be there before they are asked for.
        limit: Items that the thread reads at most; the main thread reads further ones.
        around: Makes the context in which the thread reads, given `turn`.
        ready: Called with each item in the thread; gives the call that the main thread makes in place of taking it.
        watch: Looks at what both threads share.
    """

    def __init__(
        self,
        inner: Any,
        *,
        ahead: int,
        limit: float = float("inf"),
        around: Callable[[Callable[[], None]], AbstractContextManager[Any]] = lambda turn: nullcontext(),
        ready: Callable[[Any], Callable[[], Any]] = lambda item: lambda: item,
        watch: Watch | None = None,
    ) -> None:
        self.inner = inner
        self._ahead, self._limit, self._around, self._ready, self._watch = ahead, limit, around, ready, watch
        self._changed = threading.Condition()
        self._items: deque[Callable[[], Any]] = deque()
        self._is_asked = self._is_resting = self._is_reading = self._is_in_line = False
        self._has_read = self._is_over = self._is_closed = self._has_ended = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, name="lightning_parallel-read-ahead", daemon=True)
        if watch is not None:
            watch.look()
        self._thread.start()

    # The main thread ----------------------------------------------------------------------------------------------

    def __next__(self) -> Any:
        self._look()
        with self._changed:
            self._is_resting, self._is_asked = False, not self._items
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._items or self._has_ended)
            finally:  # also where a signal ends it
                self._is_asked = False
            item = self._items.popleft() if self._items else None
            self._changed.notify_all()
        if item is not None:
            self._look()
            return item()
        if self._error is not None:
            raise self._error
        return next(self.inner)

    def settle(self) -> int:
        """Let the thread rest until the next item is asked for; returns how many items are there already."""
        with self._changed:
            self._is_resting = True
            self._changed.wait_for(lambda: not self._is_reading or self._is_in_line)
            return len(self._items)

    def pause(self) -> None:
        """Let the thread rest, and look at nothing until `resume`."""
        self._look()
        self.settle()

    def resume(self) -> None:
        """Look again from here on."""
        if self._watch is not None:
            self._watch.look()

    def _look(self) -> None:
        if self._watch is None or (self._has_ended and not self._has_read):
            return
        with self._changed:
            has_read, self._has_read = self._has_read, self._is_reading
        if self._watch.look():
            # Asked again: it may have begun to read just before the look, or read all the time.
            self._watch.tell(has_read=has_read or self._has_read)
            self._is_over = True

    def close(self) -> None:
        """End the thread. Items that nobody has asked for are lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_PATIENCE)
            if self._thread.is_alive():
                rank_zero_warn(
                    f"a batch that DevicePrefetch reads ahead has not come for {_PATIENCE:.0f} s, so its thread is "
                    "left behind; it ends with that batch or with the process"
                )
        self._items.clear()

    def reset(self) -> None:
        """End the thread, and reset the iterator."""
        self.close()
        self.inner.reset()

    def __len__(self) -> int:
        return len(self.inner)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.settle()
        return copy.deepcopy(self.inner, memo)

    # The thread ---------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """In the thread, wait until the main thread waits for the item that is being read."""
        with self._changed:
            self._is_in_line = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_asked or self._is_closed)
            self._is_in_line = False
            if self._is_closed:
                raise Ended

    def _read(self) -> None:
        try:
            with self._around(self.turn):
                while self._limit > 0 and self._may_read():
                    self._limit -= 1
                    self._give(self._ready(next(self.inner)))
        except Ended:
            pass
        except StopIteration as end:
            self._error = end
        except BaseException as error:  # also SystemExit: it is the main thread that it is meant for
            error.add_note(_NOTE)
            self._error = error
        finally:
            with self._changed:
                self._is_reading, self._has_ended = False, True
                self._changed.notify_all()

    def _may_read(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (not self._is_resting and len(self._items) < self._ahead))
            if self._is_closed or self._is_over:
                return False
            self._is_reading = self._has_read = True
            return True

    def _give(self, item: Callable[[], Any]) -> None:
        with self._changed:
            self._items.append(item)
            self._is_reading = self._is_asked = False
            self._changed.notify_all()
