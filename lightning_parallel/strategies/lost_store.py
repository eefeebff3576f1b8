"""A rank whose store is gone, with the process of rank 0: nobody can tell it any more that it waits in vain."""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_parallel import _torch
from lightning_parallel.strategies.rank_places import collective_in_words
from lightning_parallel.strategies.stillness import Stillness

_LOOK = 0.5
"""Seconds between two looks."""


def waits_in_vain(is_over: threading.Event, thread: int, since: int, patience: Callable[[], float]) -> str | None:
    """Wait until this rank stands still in a collective, of which no end can come.

    Rank 0 may be done with the run, and this rank almost: then it waits for no other one, and may take its time. Gloo
    ends a collective whose connection is lost; but not always one that begins at that moment, and none that waits for
    another rank than the one that is gone.

    Args:
        is_over: Set when the run of this rank is.
        thread: Identity of the one in which the run is.
        since: When the run began, in nanoseconds since 1970: collectives from before do not count.
        patience: How many seconds it has to stand still, as far as is known now.

    Returns:
        The collective; ``None`` where the run is over before.
    """
    stillness, name = Stillness(thread), ""
    while not is_over.wait(min(_LOOK, patience())):
        waiting = [each for each in _torch.flight_recorder.pending() if each.began >= since]
        last, name = name, collective_in_words(waiting[0]) if waiting else ""
        if not name or name != last:
            stillness = Stillness(thread)
        elif stillness.has_lasted(patience()):
            return name
    return None
