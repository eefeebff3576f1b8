"""Whether a rank stands still after an error elsewhere: it waits for one that does not come, and saves nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from sys import _current_frames as frames_of_threads
from types import FrameType
from typing import Any

from lightning_parallel.strategies.processor_time import processor_seconds

LONG_ENOUGH = 3.0
"""Seconds without a move after which a rank waits in vain: what would have raised in it has raised by then."""
_BUSY = 0.25
"""Share of a processor from which on a process computes; a device that is waited for may take a whole one."""
_SAVING = ("lightning_parallel.checkpoint.", "torch.distributed.checkpoint.")
_SAVES = frozenset({"save_checkpoint", "on_exception"})


class Stillness:
    """Looks from another thread whether a thread is where it was before.

    Args:
        thread: Its identity.

    Example:
        >>> stillness = Stillness(threading.main_thread().ident)
        >>> while not stillness.has_lasted(3.0):
        ...     time.sleep(0.5)
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        self._calls: list[Any] = []
        self._since = self._used = 0.0

    def has_lasted(self, seconds: float) -> bool:
        """Whether nothing has moved, been computed or been saved for that long, as far as looks have shown.

        Args:
            seconds: How long.
        """
        now, used, frames = time.monotonic(), processor_seconds(), frames_of_threads()
        calls = [(frame.f_code, frame.f_lasti) for frame in _outwards(frames.get(self._thread))]
        is_busy = used - self._used > _BUSY * (now - self._since) + 0.05
        if not calls or calls != self._calls or is_busy or any(map(_is_saving, frames.values())):
            self._calls, self._since, self._used = calls, now, used
        return now - self._since >= seconds


def _is_saving(frame: FrameType) -> bool:
    return any(
        each.f_code.co_name in _SAVES or str(each.f_globals.get("__name__", "")).startswith(_SAVING)
        for each in _outwards(frame)
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """The calls of a thread, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back
