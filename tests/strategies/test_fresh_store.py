"""Ranks meet in a store in which others have met before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from lightning_parallel.strategies.fresh_store import agreed_name

SIZE = 3


def test_each_start_has_a_name_of_its_own() -> None:
    store = dist.HashStore()
    found = []
    for _ in range(3):
        with ThreadPoolExecutor() as threads:
            # The last ranks first: they find what the start before has left.
            names = [
                threads.submit(agreed_name, store, rank, SIZE, timedelta(seconds=10)) for rank in reversed(range(SIZE))
            ]
        assert len({name.result() for name in names}) == 1
        found.append(names[0].result())
    assert len(set(found)) == 3


def test_ranks_that_do_not_come_are_waited_for_in_vain() -> None:
    with pytest.raises(RuntimeError, match="not all of 2 ranks have come"):
        agreed_name(dist.HashStore(), 0, 2, timedelta(seconds=0.1))
