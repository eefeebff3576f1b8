"""Ranks that have different numbers of batches end together, and count each sample once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.jobs.uneven import batches_of, different_sharers, gathered, one_sharer_shorter, trained, validated
from tests.parity import TOLERANCE, difference
from tests.rank_pool import RankError

NAMES = ["ddp_custom", "zero1_custom", "fsdp_custom"]
OTHERS = [
    ("zero2_custom", 2),
    ("fsdp_offload_custom", 2),
    ("hsdp_custom", 4),
    ("fsdp_tp_custom", 4),
    ("fsdp_custom:shard=2,pipeline=2", 4),
    ("fsdp_custom:shard=2,context=2", 4),
]
FIVE, THREE = [4] * 5, [4] * 3


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("name", NAMES)
def test_an_epoch_ends_with_the_shortest(name: str, kind: str, window: int, ranks: Any) -> None:
    found = ranks(2).run(trained, name, 2, [FIVE, THREE], kind, accumulate_grad_batches=window, deadline=60)
    equal = ranks(2).run(trained, name, 2, [THREE, THREE], kind, accumulate_grad_batches=window, deadline=60)
    assert found[0][1] == found[1][1] == equal[0][1]
    assert [is_last for _, is_last in found[0][1]] == [False, False, True] * 2
    assert difference(found[0][0], equal[0][0]) == 0
    assert len(found[0][2]) == 1
    assert not equal[0][2]


@pytest.mark.parametrize(("name", "size"), OTHERS)
def test_so_it_does_under_other_names_and_products(name: str, size: int, ranks: Any) -> None:
    readers = size if name.startswith(("zero2", "hsdp", "fsdp_offload")) else 2
    uneven = [FIVE, THREE, *[[4] * 4] * (readers - 2)]
    found = ranks(size).run(trained, name, size, uneven, "stream", accumulate_grad_batches=2, deadline=60)
    equal = ranks(size).run(trained, name, size, [THREE] * readers, "stream", accumulate_grad_batches=2, deadline=60)
    assert all(each[1] == equal[0][1] for each in found)
    assert difference(found[0][0], equal[0][0]) == 0
    assert len(found[0][2]) == 1


@pytest.mark.parametrize(("name", "size"), OTHERS)
def test_so_are_samples_counted_under_other_names_and_products(name: str, size: int, ranks: Any) -> None:
    readers = size if name.startswith(("zero2", "hsdp", "fsdp_offload")) else 2
    sizes = [[4, 4, 4, 4], [4, 3], [4], [2, 1]][:readers]
    found = ranks(size).run(validated, name, size, sizes, "stream", fits=True, deadline=60)
    rows = torch.cat([b[0] for reader in range(readers) for b in batches_of(reader, sizes[reader])]).float()
    for values, _, _ in found:
        assert values["value"] == pytest.approx(float(rows.mean()), rel=TOLERANCE)
        assert values["count"] == 2 * len(rows)
        assert values["sum"] == pytest.approx(2 * float(rows.sum()))


@pytest.mark.parametrize("fits", [False, True])
@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("name", NAMES)
def test_evaluation_counts_each_sample_once(name: str, kind: str, fits: bool, ranks: Any) -> None:
    sizes = [[4, 4, 4, 4], [4, 3]]
    found = ranks(2).run(validated, name, 2, sizes, kind, fits=fits, deadline=60)
    rows = torch.cat([batch[0] for rank in range(2) for batch in batches_of(rank, sizes[rank])]).float()
    for rank, (values, seen, ends) in enumerate(found):
        assert values["value"] == pytest.approx(float(rows.mean()), rel=TOLERANCE)
        assert values["count"] == 2 * len(rows)
        assert values["sum"] == pytest.approx(2 * float(rows.sum()))
        assert seen == ends == 2 * len(sizes[rank])


@pytest.mark.parametrize("kind", ["stream", "sized"])
@pytest.mark.parametrize("job", [trained, validated])
def test_a_rank_without_batches(job: Any, kind: str, ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 1 has no batch"):
        ranks(2).run(job, "fsdp_custom", 2, [THREE, []], kind, deadline=60)


@pytest.mark.parametrize("kind", ["stream", "sized"])
def test_meetings_in_steps_that_a_rank_does_not_run(kind: str, ranks: Any) -> None:
    """Up to there they are the user's; all ranks say why, where all run the step."""
    ranks(2).run(gathered, "fsdp_custom", 2, [THREE, THREE], kind, deadline=60)
    with pytest.raises(RankError, match=r"waits for all ranks, but there is no batch left for rank 1"):
        ranks(2).run(gathered, "fsdp_custom", 2, [FIVE, THREE], kind, deadline=60)


@pytest.mark.parametrize("name", ["tp_custom", "pp_custom"])
def test_ranks_that_share_samples(name: str, ranks: Any) -> None:
    found = ranks(2).run(trained, name, 2, [[4, 4, 2]], "stream", accumulate_grad_batches=2, deadline=60)
    one = trained("auto", 1, [[4, 4, 2]], "stream", accumulate_grad_batches=2)
    assert difference(found[0][0], one[0]) <= TOLERANCE
    assert found[0][1] == found[1][1] == one[1]
    assert not found[0][2]
    with pytest.raises(RankError, match="ranks 0 and 1 compute the same samples together"):
        ranks(2).run(one_sharer_shorter, name, deadline=60)


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("name", ["tp_custom", "cp_custom", "pp_custom"])
def test_ranks_that_should_share_samples_and_do_not(name: str, fits: bool, ranks: Any) -> None:
    """Without a word from the package, validation would wait for ever, or give the numbers of a mixture."""
    words = rf"have read different ones as their first batch \({'train' if fits else 'validate'}, loader 0\)"
    with pytest.raises(RankError, match=words):
        ranks(2).run(different_sharers, name, fits=fits, deadline=60)
