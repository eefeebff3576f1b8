"""Samplers that the user's module makes for ranks; streams that give all ranks the same samples."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data import GLOBAL_BATCH
from tests.jobs.own_samplers import DATA, trained
from tests.parity import TOLERANCE, difference
from tests.rank_pool import RankError

WHOLE = [list(range(start, start + GLOBAL_BATCH)) for start in range(0, len(DATA), GLOBAL_BATCH)]


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["sampler", "batches"])
@pytest.mark.parametrize("name", ["tp_custom", "cp_custom", "pp_custom"])
def test_a_sampler_for_all_ranks_deals_out_to_readers(name: str, kind: str, own: bool, ranks: Any) -> None:
    """One reader reads what one process reads; Lightning's own dealing is on or off."""
    one = trained("auto", 1, kind)
    found = ranks(2).run(trained, name, 2, kind, use_distributed_sampler=not own, deadline=60)
    assert found[0][1] == found[1][1] == one[1] == WHOLE * 2
    assert difference(found[0][0], one[0]) <= TOLERANCE
    assert len(found[0][2]) == 1, found[0][2]
    assert "for 2 ranks deals out its samples to 1 reader" in found[0][2][0]


@pytest.mark.parametrize("name", ["fsdp_custom:pipeline=2,shard=2", "fsdp_custom:tensor=2,shard=2"])
def test_several_readers(name: str, ranks: Any) -> None:
    one = trained("auto", 1, "sampler")
    found = ranks(4).run(trained, name, 4, "sampler", deadline=60)
    of_readers = found[0][1], found[1 if "pipeline" in name else 2][1]
    assert [sorted(a + b) for a, b in zip(*of_readers, strict=True)] == WHOLE * 2
    assert difference(found[0][0], one[0]) <= TOLERANCE
    assert "deals out its samples to 2 readers" in found[0][2][0]


def test_samples_without_batches(ranks: Any) -> None:
    found = ranks(2).run(trained, "tp_custom", 2, "single", limit_train_batches=3, deadline=60)
    assert found[0][1] == found[1][1] == [[0], [1], [2]] * 2


@pytest.mark.parametrize("kind", ["sampler", "batches", "class"])
def test_where_all_ranks_read_it_stays_as_it_is(kind: str, ranks: Any) -> None:
    found = ranks(2).run(trained, "ddp_custom", 2, kind, deadline=60)
    assert [sorted(a + b) for a, b in zip(found[0][1], found[1][1], strict=True)] == WHOLE * 2
    assert not found[0][2]


def test_what_is_dealt_out_otherwise_is_not_guessed_at(ranks: Any) -> None:
    with pytest.raises(RankError, match="have read different ones as their first batch"):
        ranks(2).run(trained, "tp_custom", 2, "class", deadline=60)
    found = ranks(2).run(trained, "tp_custom", 2, "nodes", deadline=60)
    assert found[0][1] == found[1][1] == WHOLE * 2
    assert not found[0][2]


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_a_stream_that_nobody_deals_out_is_told_of(name: str, ranks: Any) -> None:
    """Each rank trains on all samples, where one process trains on each once."""
    found = ranks(2).run(trained, name, 2, "stream", deadline=60)
    assert len(found[0][2]) == 1, found[0][2]
    assert "ranks 0 and 1 have read the same samples as their first batch of training" in found[0][2][0]
    assert not ranks(2).run(trained, "tp_custom", 2, "stream", deadline=60)[0][2]
