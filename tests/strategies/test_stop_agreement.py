"""The thread of a rank that hears of signals: it answers at once, and ends at once."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from lightning_parallel.strategies.stops import POLL, StopAgreement


@pytest.fixture
def stops() -> StopAgreement:
    return StopAgreement("test", 0, 1, None, lambda: False)


def test_the_end_of_a_fit_does_not_wait_for_the_next_look(stops: StopAgreement) -> None:
    begin = time.perf_counter()
    stops.close()
    assert time.perf_counter() - begin < POLL / 4
    assert "rank-signals" not in {thread.name for thread in threading.enumerate()}


def test_a_signal_is_heeded_behind_a_step(stops: StopAgreement) -> None:
    assert stops.end_step() is None
    stops.ask(signal.SIGTERM)
    end = time.monotonic() + 5
    heeded = None
    while heeded is None and time.monotonic() < end:
        time.sleep(0.01)  # a step
        heeded = stops.end_step()
    assert heeded == signal.SIGTERM
    stops.close()


def test_a_signal_that_nobody_heeds_does_not_hold_up_the_end(stops: StopAgreement) -> None:
    stops.ask(signal.SIGTERM)
    time.sleep(0.05)  # the thread waits for a step to end now
    begin = time.perf_counter()
    stops.close()
    assert time.perf_counter() - begin < POLL / 4
