"""Samplers that the user's module makes for ranks; streams that give all ranks the same samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from tests.data import GLOBAL_BATCH
from tests.jobs.own_samplers import DATA, DealsOut, trained
from tests.parity import TOLERANCE, difference, trainer_for
from tests.rank_pool import RankError

WHOLE = [list(range(start, start + GLOBAL_BATCH)) for start in range(0, len(DATA), GLOBAL_BATCH)]


class Predicts(DealsOut):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.on_train_batch_end(None, batch, batch_idx)
        return self(batch[0])


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


def test_the_user_tells_the_sampler_which_epoch_begins(ranks: Any) -> None:
    one = trained("auto", 1, "told")
    found = ranks(2).run(trained, "tp_custom", 2, "told", deadline=60)
    assert found[0][1] == found[1][1] == one[1]
    assert difference(found[0][0], one[0]) <= TOLERANCE


def test_and_so_it_does_where_all_ranks_read(ranks: Any) -> None:
    found = ranks(2).run(trained, "ddp_custom", 2, "told", deadline=60)
    one = [sorted(batch) for batch in trained("auto", 1, "told")[1]]
    assert [sorted(a + b) for a, b in zip(found[0][1], found[1][1], strict=True)] == one


def predicted(name: str, num_ranks: int) -> tuple[list[int], list[int]]:
    """The numbers of samples of a prediction, and what the sampler is given back as."""
    sampler = DistributedSampler(DATA, num_ranks, dist.get_rank(), shuffle=False)
    trainer = trainer_for(name, num_ranks)
    trainer.predict(module := Predicts("sampler", 8), DataLoader(DATA, 8, sampler=sampler), return_predictions=False)
    return [index for batch in module.read for index in batch], [sampler.num_replicas, sampler.rank, len(sampler)]


def test_in_prediction_and_behind_it(ranks: Any) -> None:
    for rank, (read, given_back) in enumerate(ranks(2).run(predicted, "tp_custom", 2, deadline=60)):
        assert read == list(range(len(DATA)))
        assert given_back == [2, rank, len(DATA) // 2]


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
