"""Parameters with which steps and hooks compute outside of layers: as in one process, under sharding and tensor."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jobs.hooks import ALONE, seen_in_hooks
from tests.models import parts_computed as parts
from tests.parity import TOLERANCE, is_moving, once, worst
from tests.rank_pool import RankError

NAMES = ("fsdp_custom", "tp_custom")
EQUAL: dict[Any, tuple[str, ...]] = {
    parts.Penalties: (*NAMES, "zero2_custom", "cp_custom", "ddp_custom", "fsdp_custom:reshard=never"),
    parts.PenaltyOfSamples: (*NAMES, "zero2_custom"),
    parts.ElasticWeights: NAMES,
    parts.SharpnessAware: NAMES,
    parts.MaskedGradients: NAMES,
    parts.Rows: NAMES,
    parts.MoreRows: NAMES,
    parts.Entries: NAMES,
    parts.Averages: NAMES,
}


def check(ranks: Any, make: Any, strategy: str, num_ranks: int, readers: int = 0) -> None:
    seen, expected = once(seen_in_hooks, make, "auto", 1)
    assert is_moving(expected)
    found = ranks(num_ranks).run(seen_in_hooks, make, strategy, num_ranks, readers)
    assert worst(found[0][1], expected) <= TOLERANCE
    for ours, _ in found:
        assert ours == pytest.approx(seen, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [(make, name) for make, names in EQUAL.items() for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_equal_to_one_process(ranks: Any, make: Any, strategy: str) -> None:
    check(ranks, make, strategy, 2)


@pytest.mark.parametrize("make", [parts.Penalties, parts.PenaltyOfSamples, parts.Rows])
@pytest.mark.parametrize(("strategy", "readers"), [("hsdp_custom", 4), ("fsdp_tp_custom", 2)])
def test_equal_to_one_process_on_a_mesh(ranks: Any, make: Any, strategy: str, readers: int) -> None:
    check(ranks, make, strategy, 4, readers)


@pytest.mark.parametrize("make", [parts.PenaltyOfRankZero, parts.LookOfRankZero])
@pytest.mark.parametrize("strategy", NAMES)
def test_a_term_of_one_rank_is_refused(ranks: Any, strategy: str, make: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2).run(seen_in_hooks, make, strategy, 2, deadline=3 * ALONE)
    words = r"an operation at .*parts_computed\.py:\d+ reads a tensor .* only 1 of them came to this line within 3 s"
    assert re.search(words, str(caught.value)), str(caught.value)
