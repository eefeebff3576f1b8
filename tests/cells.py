"""``--cells=K/N``: a share of the cells of long tests, where all of them take longer than one has.

A cell is one set of parameters of a test. Tests that are fast run whole, and of each other test one cell at least does.
The shares 1/N to N/N together are all cells, and a cell is in the same share whichever files, ``-k`` or ``-m`` choose.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

import pytest


@dataclass(frozen=True)
class Share:
    """One of a number of shares, beginning with the first."""

    number: int
    of: int

    def takes(self, names: Iterable[str]) -> set[str]:
        """The cells of one test that are in this share; if there are fewer than shares, some are in several."""
        # In an order that has nothing to do with the parameters': every third would be one schedule, or one name.
        mixed = sorted(names, key=lambda name: (crc32(name.encode()), name))
        own = mixed[self.number - 1 :: self.of]
        return set(own or [mixed[(self.number - 1) % len(mixed)]])


def share(text: str) -> Share:
    """The share that `text` says, as ``2/3``.

    Raises:
        pytest.UsageError: It says none.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--cells={text}: give a number and how many shares there are, from 1/3 to 3/3")
    return Share(int(found[1]), int(found[2]))


def left_out(items: Sequence[pytest.Item], chosen: Share) -> list[pytest.Item]:
    """The tests of `items` that `chosen` leaves to other shares."""
    cells: dict[str, list[str]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("fast") is None:
            cells[_test(item)].append(item.nodeid)
    kept = set().union(*(chosen.takes(names) for names in cells.values()))
    return [item for item in items if item.get_closest_marker("fast") is None and item.nodeid not in kept]


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
