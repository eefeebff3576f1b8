"""Operations of hooks that need other ranks, draw numbers or read buffers: as in one process, or refused in words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.jobs.hooks import ALONE, seen_in_hooks, words_in_hooks
from tests.models import part_habits as habits
from tests.parity import TOLERANCE, is_moving, once, worst
from tests.rank_pool import RankError

EQUAL: dict[Any, tuple[str, ...]] = {
    habits.Elements: ("ddp_custom", "fsdp_custom", "tp_custom"),
    habits.Joined: ("ddp_custom", "fsdp_custom", "tp_custom"),
    habits.Noise: ("ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"),
    habits.OddNoise: ("fsdp_custom", "pp_custom"),
    habits.DataOfAnother: ("ddp_custom", "fsdp_custom"),
    habits.DataOfVector: ("ddp_custom",),
    habits.Counting: ("pp_custom", "pp_custom:loss=batch"),
    habits.Gathering: ("ddp_custom", "pp_custom"),
}


@pytest.mark.parametrize(
    ("make", "strategy"),
    [(make, name) for make, names in EQUAL.items() for name in names],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_equal_to_one_process(ranks: Any, make: Any, strategy: str) -> None:
    seen, expected = once(seen_in_hooks, make, "auto", 1)
    assert is_moving(expected)
    found = ranks(2).run(seen_in_hooks, make, strategy, 2)
    assert worst(found[0][1], expected) <= TOLERANCE
    for ours, _ in found:
        assert ours == pytest.approx(seen, abs=TOLERANCE, rel=TOLERANCE)


ALONE_THERE = r"at .*part_habits\.py:\d+ reads a tensor .* only 1 of them came to this line within 3 s"
ASSIGNED = r"an assignment to parameter\.data at .*part_habits\.py:\d+ needs the value of"
IN_STEP = r"at .*part_habits\.py:\d+ waits for all ranks inside of a step"
REFUSED: list[tuple[Any, str, str]] = [
    (habits.ElementOfRankZero, "fsdp_custom", "an operation " + ALONE_THERE),
    (
        habits.DataOfAnother,
        "pp_custom",
        ASSIGNED,
    ),
    (habits.DataOfVector, "pp_custom", ASSIGNED),
    (habits.Collective, "pp_custom", r"torch\.distributed\.all_reduce\(\) " + IN_STEP),
    (habits.CollectiveBefore, "pp_custom", r"torch\.distributed\.barrier\(\) " + IN_STEP),
]


@pytest.mark.parametrize(("make", "strategy", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", value))
def test_refused_with_the_line_and_what_to_call(ranks: Any, make: Any, strategy: str, words: str) -> None:
    """Where rank 0 waits alone, the other one goes on, and waits for it: here until the deadline of the job."""
    with pytest.raises(RankError) as caught:
        ranks(2).run(seen_in_hooks, make, strategy, 2, deadline=3 * ALONE)
    assert re.search(words, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "tp_custom"])
def test_what_rank_0_does_alone_is_refused_before_it_waits(ranks: Any, strategy: str) -> None:
    words, others = ranks(2).run(words_in_hooks, habits.AloneEverywhere, strategy, 2)
    assert len(words) == 7
    assert not others
    for each in words:
        assert re.match(r"(an operation|torch\.equal) at .*part_habits\.py:\d+ reads a tensor .* only 1 of them", each)


@pytest.mark.parametrize(("strategy", "size"), [("pp_custom", 2), ("fsdp_custom:pipeline=2,shard=2", 4)])
def test_what_lightning_reads_on_rank_0_alone_is_refused_where_stages_would_wait(
    ranks: Any, strategy: str, size: int
) -> None:
    norm, equal = ranks(size).run(words_in_hooks, habits.ReadersOfLightningAlone, strategy, size)[0]
    assert re.match(
        r"(grad_norm|an operation) at .*part_habits\.py:\d+ reads a tensor .* 2 ranks has a part, but only 1 of them",
        norm,
    )
    assert re.match(rf"BaseFinetuning\.filter_on_optimizer at .* each of {size} ranks has a part", equal)
