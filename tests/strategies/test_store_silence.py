"""A store that answers no more ends a rank that does not move, and no other."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lightning_parallel.strategies.hang_words import silence_words
from lightning_parallel.strategies.rank_places import Place
from lightning_parallel.strategies.store_silence import StoreSilence

LIMIT = 1.0


class Store:
    """Answers some questions, and then none before it is let go."""

    def __init__(self, num_answers: int) -> None:
        self.num_left, self.goes_on = num_answers, threading.Event()

    def check(self, _: list[str]) -> bool:
        self.num_left -= 1
        if self.num_left < 0:
            self.goes_on.wait()
        return False


@pytest.fixture
def ended() -> Iterator[Callable[..., list[float]]]:
    stores: list[Store] = []

    def run(num_answers: int, progress: Callable[[], list[int]], seconds: float) -> list[float]:
        stores.append(Store(num_answers))
        found: list[float] = []
        store: Any = stores[-1]
        silence = StoreSilence(store, limit=LIMIT, progress=progress, end=found.append)
        end = time.monotonic() + seconds
        while not found and time.monotonic() < end:
            time.sleep(0.01)
        silence.stop()
        return found

    yield run
    for store in stores:
        store.goes_on.set()


def test_a_rank_that_stands_still_without_the_store_ends(ended: Any) -> None:
    (seconds,) = ended(3, lambda: [7], 60.0)
    assert seconds >= LIMIT


def test_a_rank_that_moves_goes_on(ended: Any) -> None:
    numbers = itertools.count()
    assert ended(3, lambda: [next(numbers)], 3 * LIMIT) == []


def test_a_rank_whose_store_answers_goes_on(ended: Any) -> None:
    assert ended(10**9, lambda: [7], 3 * LIMIT) == []


def test_words_name_the_rank_and_the_place() -> None:
    place = Place("training, epoch 0, batch 2", [2], True, collective="all_reduce, number 7 of all ranks")
    said = silence_words(3, place, 300.4, "hang_rank3.txt")
    assert "rank 3 is cut off" in said
    assert "for 300 seconds" in said
    assert "rank 3 waits for all_reduce, number 7 of all ranks; training, epoch 0, batch 2" in said
