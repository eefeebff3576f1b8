"""A thread that reads figures once a while."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

_PATIENCE = 10.0
"""Seconds for which the end of a fit waits for figures that are being read."""


class Sampler:
    """Calls a function in a thread, once every so many seconds, until `stop`.

    Args:
        read: Returns figures, the same number each time.
        seconds: The time between two calls.
    """

    def __init__(self, read: Callable[[], list[float]], seconds: float) -> None:
        self.error: BaseException | None = None
        """The error that `read` has raised; it is not called again."""
        self._read, self._seconds = read, seconds
        self._rows: deque[list[float]] = deque()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lightning_parallel-sampler", daemon=True)
        self._thread.start()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of a trainer samples by itself."""

    def taken(self) -> list[list[float]]:
        """The figures since the last call, in order."""
        return [self._rows.popleft() for _ in range(len(self._rows))]

    def read_once(self) -> list[list[float]]:
        """The figures of now, when the thread has ended; none where that fails, or has failed before."""
        if self.error is None and not self._thread.is_alive():
            self._take()
        return self.taken()

    def stop(self) -> bool:
        """End the thread, once it has read what it reads; whether it has ended, and is not stuck in a driver."""
        self._is_over.set()
        self._thread.join(_PATIENCE)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self.error is None and not self._is_over.wait(self._seconds):
            self._take()

    def _take(self) -> None:
        try:
            self._rows.append(self._read())
        except Exception as error:  # of a driver; a training should not end for it
            self.error = error
