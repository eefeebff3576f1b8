"""Shares of cells together are the whole, and each has something of every test."""

from __future__ import annotations

import pytest

from tests.cells import Share, share

NAMES = [f"tests/test_x.py::test_y[{name}-{number}]" for name in ("ddp", "fsdp", "tp", "pp") for number in range(9)]


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_shares_are_the_whole(of: int) -> None:
    parts = [Share(number, of).takes(NAMES) for number in range(1, of + 1)]
    assert sorted(name for part in parts for name in part) == sorted(NAMES)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_share_has_cells_of_every_name() -> None:
    for number in (1, 2, 3):
        assert {name.partition("[")[2].partition("-")[0] for name in Share(number, 3).takes(NAMES)} == {
            "ddp",
            "fsdp",
            "tp",
            "pp",
        }


def test_every_share_has_a_cell_of_each_test() -> None:
    few = NAMES[:2]
    parts = [Share(number, 3).takes(few) for number in (1, 2, 3)]
    assert [len(part) for part in parts] == [1, 1, 1]
    assert set().union(*parts) == set(few)


def test_in_the_same_share_whatever_the_order() -> None:
    assert Share(2, 3).takes(NAMES) == Share(2, 3).takes(reversed(NAMES))


def test_read_from_text() -> None:
    assert share("2/3") == Share(2, 3)


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "a/3", "1/0", "-1/3"])
def test_no_share(text: str) -> None:
    with pytest.raises(pytest.UsageError, match="from 1/3 to 3/3"):
        share(text)
