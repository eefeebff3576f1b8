"""Ranks that wait for others which do not come: the run ends, and says where each rank is."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.jobs import hangs
from tests.rank_pool import RankError


def ended(ranks: Any, case: str, strategy: str) -> str:
    """What the ranks say of a hang, both of which have ended with exit status 1."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(2).run(hangs.fit, case, strategy, deadline=60.0)
    said = str(caught.value)
    print(said)
    assert time.monotonic() - began < 60
    assert said.count("died with exit code 1") == 2, said
    assert said.count("this run hangs") == 1, said
    return said


@pytest.mark.parametrize(
    ("case", "strategy"),
    [("barrier", "fsdp_custom"), ("data", "fsdp_custom"), ("data", "pp_custom"), ("save", "pp_custom")],
)
def test_explore(ranks: Any, case: str, strategy: str) -> None:
    ended(ranks, case, strategy)
