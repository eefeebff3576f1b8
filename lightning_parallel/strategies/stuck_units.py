"""Ranks that wait for each other for ever because they have called different sharded units."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist

from lightning_parallel import _torch
from lightning_parallel.module.unit_order import Calls, UnitOrder, in_words
from lightning_parallel.strategies.failures import FailureWatch

STILL = 10.0
"""Seconds without a further call after which a rank tells the others which units it has called."""
_POLL = 1.0
_JOIN = 5.0


@contextlib.contextmanager
def stuck_units_watched(order_of: Callable[[], UnitOrder], failures: FailureWatch) -> Iterator[None]:
    """Inside this context, a thread ends ranks that wait for each other in calls of different units.

    A rank that is only slow calls what the others have called, so nothing but a contradiction ends a run: ranks that
    have called different units, or one that has more calls than another whose backward has begun.

    Args:
        order_of: Returns the units that this rank has called; it may be another object after a pipeline is cut again.
        failures: Ends this rank, and tells the others.
    """
    if not order_of().units:
        yield
        return
    is_over = threading.Event()
    watch = _Watch(order_of, failures)
    thread = threading.Thread(target=watch.run, args=(is_over,), daemon=True, name="stuck-units")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_JOIN)


@dataclass
class _Watch:
    order_of: Callable[[], UnitOrder]
    failures: FailureWatch

    def run(self, is_over: threading.Event) -> None:
        last: Calls | None = None
        told: Calls | None = None
        since = 0.0
        store: dist.Store | None = None
        with contextlib.suppress(RuntimeError):  # the store may end with rank 0, which may be done
            while not is_over.wait(_POLL) and not self.failures.has_heard:
                order = self.order_of()
                now = order.calls
                since = since + _POLL if now == last else 0.0
                last = now
                if since < STILL:
                    continue
                store = store or _torch.groups.connected_store()
                if now != told:
                    store.set(self._key(dist.get_rank()), json.dumps(now))
                    told = now
                self._compare(store, order, now)

    def _key(self, rank: int) -> str:
        return f"{self.failures.key}/calls/{rank}"

    def _compare(self, store: dist.Store, order: UnitOrder, own: Calls) -> None:
        """End this rank if the first one of those that share parameters waits elsewhere."""
        first = self._key(order.first_rank)
        if order.first_rank == dist.get_rank() or not store.check([first]):
            return
        theirs = Calls(*json.loads(store.get(first)))
        if own.contradicts(theirs):
            self.failures.end(in_words(list(order.units), [theirs.beside(own), own.beside(theirs)]))
