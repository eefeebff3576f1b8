"""Loaders with batch samplers: each rank reads a share of what one process reads."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_parallel.strategies.batches_of_rank import BatchesOfRank
from lightning_parallel.strategies.sampling import SampleDealer
from tests.jobs.batch_samplers import Buckets, read
from tests.rank_pool import RankError

NAMES = ["ddp_custom", "fsdp_custom"]


def in_turn(found: list[Any], name: str) -> list[list[float]]:
    """What all ranks read, batch after batch; numbers of samples in place of the first of their four numbers."""
    turns = itertools.zip_longest(*(f[0][name] for f in found))
    return [[value / 4 for value in batch] for turn in turns for batch in turn if batch is not None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["plain", "dropped", "distributed"])
def test_a_plain_batch_sampler_is_as_a_batch_size(kind: str, name: str, ranks: Any) -> None:
    """Step ``i`` of both ranks together has the samples of step ``i`` of one process with the global batch size."""
    found = ranks(2).run(read, name, 2, kind, 22)
    for stage, epochs in (("train", 2), ("validation", 2), ("test", 1)):
        batches = in_turn(found, stage)
        steps = [sorted(a + b) for a, b in zip(batches[::2], batches[1::2], strict=True)]
        whole = [list(range(start, min(start + 8, 22))) for start in range(0, 22, 8)]
        assert steps == (whole[:-1] if kind == "dropped" else whole) * epochs, stage
    assert torch.equal(found[0][1], found[1][1])


def test_drawn_orders(ranks: Any) -> None:
    found = ranks(2).run(read, "ddp_custom", 2, "drawn", 24)
    batches = in_turn(found, "train")
    epochs = batches[: len(batches) // 2], batches[len(batches) // 2 :]
    for epoch in epochs:
        assert sorted(index for batch in epoch for index in batch) == list(range(24))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(("num_samples", "repeated"), [(24, []), (18, [[0, 1, 2]])])
@pytest.mark.parametrize("name", NAMES)
def test_own_batches_stay_whole(name: str, num_samples: int, repeated: Any, ranks: Any) -> None:
    """Every rank takes its turn; where batches do not come out even, training reads the first ones again."""
    one = [[value / 4 for value in batch] for batch in read("auto", 1, "buckets", num_samples)[0]["test"]]
    found = ranks(2).run(read, name, 2, "buckets", num_samples)
    assert in_turn(found, "test") == one
    assert in_turn(found, "train") == (one + repeated) * 2


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_rank_has_as_many_batches(num_ranks: int) -> None:
    def dealt(rank: int, batches: Any) -> BatchesOfRank:
        return BatchesOfRank(batches, num_replicas=num_ranks, rank=rank, seed=3, is_same=lambda _: True)

    every = [dealt(rank, Buckets(24, draws=False)) for rank in range(num_ranks)]
    assert {len(list(each)) for each in every} == {len(each) for each in every} == {-(-12 // num_ranks)}
    assert [batch for turn in zip(*every, strict=True) for batch in turn][:12] == Buckets(24).batches
    endless = iter(dealt(0, itertools.repeat([0])))
    assert next(endless) == next(endless) == [0]
    state = torch.get_rng_state()
    drawn = [list(dealt(0, Buckets(24))) for _ in range(2)]
    assert drawn[0] == drawn[1]  # in one epoch, whatever else was drawn
    assert torch.equal(torch.get_rng_state(), state)
    assert list(dealt(0, Buckets(0))) == []


@pytest.mark.parametrize(("num_batches", "num_ranks"), [(12, 5), (3, 3), (2, 3)])
def test_evaluation_reads_no_batch_twice(num_batches: int, num_ranks: int) -> None:
    """Where there are fewer batches than ranks, each still has one."""
    batches = [[index] for index in range(num_batches)]
    every = [
        BatchesOfRank(batches, num_replicas=num_ranks, rank=rank, seed=3, is_same=lambda _: True, repeats=lambda: False)
        for rank in range(num_ranks)
    ]
    of_ranks = [list(each) for each in every]
    assert [len(each) for each in every] == list(map(len, of_ranks))
    assert sum(map(len, of_ranks)) == max(num_batches, num_ranks)


def test_ranks_that_draw_differently_are_refused(ranks: Any) -> None:
    with pytest.raises(RankError, match="the batch sampler Buckets has other batches on other ranks"):
        ranks(2).run(read, "ddp_custom", 2, "unlike", 24)


@pytest.mark.parametrize("with_batches", [False, True])
@pytest.mark.parametrize(
    ("num_samples", "words"), [(7, "7 samples are dealt out to 2 ranks, 4 to each: 1 more"), (8, "")]
)
def test_samples_that_are_read_twice_are_counted(
    num_samples: int, words: str, with_batches: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trainer: Any = SimpleNamespace(
        _accelerator_connector=SimpleNamespace(use_distributed_sampler=True),
        state=SimpleNamespace(fn=TrainerFn.FITTING),
        **dict.fromkeys(("sanity_checking", "validating", "testing"), False),
        distributed_sampler_kwargs={"num_replicas": 2, "rank": 0},
        overfit_batches=0.0,
    )
    batches = BatchSampler(SequentialSampler(range(num_samples)), 2, drop_last=False)
    data: Any = range(num_samples)
    loader = DataLoader(data, batch_sampler=batches) if with_batches else DataLoader(data, batch_size=2)
    dealer = SampleDealer(trainer)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            dealer.deal_out(loader)
    assert [words in message for message in caplog.messages] == ([True] if words else [])
