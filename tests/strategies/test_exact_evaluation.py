"""Evaluation reads each sample once, however many there are: its numbers are those of one process."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch.utilities.combined_loader import CombinedLoader

from lightning_parallel.strategies import sampling
from tests.jobs.evaluations import evaluated, loader_of, predicted
from tests.models.containers import Collects
from tests.models.pipelined import DeepTied
from tests.parity import TOLERANCE, trainer_for
from tests.rank_pool import RankError

NAMES = ["ddp_custom", "zero1_custom", "fsdp_custom", "cp_custom", "pp_custom"]


@functools.cache
def one_process(kind: str, num_samples: int, entry: str) -> Any:
    return evaluated("auto", 1, kind, num_samples, entry=entry)


def assert_equal(found: Any, expected: Any, *, fits: bool = False) -> None:
    """Equal logged values, and the same samples once."""
    for name, value in expected[0].items():
        assert found[0][name] == pytest.approx(value, rel=1e-4 if fits else TOLERANCE), name
    assert sorted(found[1]) == pytest.approx(sorted(expected[1]))


@pytest.mark.parametrize("num_samples", [29, 33])
@pytest.mark.parametrize("entry", ["validate", "test", "fit"])
@pytest.mark.parametrize("name", NAMES)
def test_each_sample_counts_once(name: str, entry: str, num_samples: int, ranks: Any) -> None:
    """On two ranks, 29 samples differ in the last batch, 33 in the number of batches."""
    expected = one_process("", num_samples, entry)
    for found in ranks(2).run(evaluated, name, 2, "", num_samples, entry=entry, deadline=60):
        assert_equal(found, expected, fits=entry == "fit")


@pytest.mark.parametrize("num_samples", [29, 33, 35])
@pytest.mark.parametrize("name", ["fsdp_custom:pipeline=2", "fsdp_tp_custom"])
def test_products(name: str, num_samples: int, ranks: Any) -> None:
    """Under a pipeline, batches of 4 and of 1 sample are cut into as many microbatches: each is a gather."""
    expected = one_process("", num_samples, "validate")
    for found in ranks(4).run(evaluated, name, 4, "", num_samples, readers=2, deadline=90):
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("kind", "num_samples"),
    [
        ("batch sampler", 29),
        ("own", 29),
        ("lying", 29),
        ("shuffled", 29),
        ("drop_last", 29),
        ("drop_last", 7),
    ],
)
def test_loaders(kind: str, num_samples: int, ranks: Any) -> None:
    expected = one_process("" if kind == "shuffled" else kind, num_samples, "validate")
    for found in ranks(2).run(evaluated, "fsdp_custom", 2, kind, num_samples, deadline=60):
        if kind == "shuffled":
            # In another order, batches have other means; each sample is there once.
            assert sorted(found[1]) == pytest.approx(sorted(expected[1]))
        else:
            assert_equal(found, expected)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "pp_custom"])
@pytest.mark.parametrize("gathers", ["step", "end"])
def test_gathered_rows_are_as_many(name: str, gathers: str, ranks: Any) -> None:
    expected = one_process("", 29, "validate")
    results = ranks(2).run(evaluated, name, 2, "", 29, gathers=gathers, deadline=60)
    for found in results:
        assert_equal(found, expected)
        if gathers == "end":
            assert len(found[2]) == (29 if name == "pp_custom" else 30)
            assert sorted(set(found[2])) == pytest.approx(sorted(set(expected[1])))
    words = [word for _, _, _, told in results for word in told]
    assert len(words) == (0 if name == "pp_custom" else 1)
    assert all("gives [" in word and "rank 1 gives" in word and "count twice" in word for word in words)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_predictions_are_gathered(name: str, ranks: Any) -> None:
    """Lightning repeats none either, and ranks may have different numbers."""
    expected = sorted(set(predicted("auto", 1, 29)))
    for found in ranks(2).run(predicted, name, 2, 29, deadline=60):
        assert len(found) == 30
        assert sorted(set(found)) == pytest.approx(expected)


def collected(name: str) -> dict[str, Any]:
    """What a module collects in an evaluation in which rank 0 has one batch more."""
    module = Collects()
    trainer_for(name, 2).validate(module, loader_of("", 33, 4), verbose=False)
    return module.collected()


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_nothing_remains_of_a_step_that_runs_again(name: str, ranks: Any) -> None:
    sizes = [4.0] * 4
    for rank, found in enumerate(ranks(2).run(collected, name, deadline=60)):
        own = [*sizes, 1.0] if rank == 0 else sizes
        assert found["in_dict"]["val"] == found["in_lists"][1] == found["plain"]["val"] == found["recent"] == own
        assert found["counted"]["val"] == found["sums"]["val"] == sum(own)
        assert found["meters"]["val"] == found["meters"]["lazy val"] == (sum(own), [0.0, *own])


def test_what_cannot_be_gathered(ranks: Any) -> None:
    with pytest.raises(RankError, match=r"the first one gives \[1, 15\] and rank 1 gives \[1, 14\]"):
        ranks(2).run(evaluated, "ddp_custom", 2, "", 29, gathers="all", deadline=60)
    with pytest.raises(RankError, match=r"there is no batch left for rank 1"):
        ranks(2).run(evaluated, "ddp_custom", 2, "", 33, gathers="step", deadline=60)


class Pairwise(DeepTied):
    """Runs the layers for each loader that has a batch left."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.seen = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for each in batch.values():
            if each is not None:
                self(each[0])
                self.seen += len(each[0])


def seen_together(mode: Any) -> tuple[int, list[str]]:
    """How many samples of two loaders this rank sees, and what is said of them."""
    module, said = Pairwise(), []
    loaders = CombinedLoader({"a": loader_of("", 29, 4), "b": loader_of("", 33, 4)}, mode)
    with mock.patch.object(sampling, "rank_zero_info", said.append):
        trainer_for("fsdp_custom", 2).validate(module, loaders, verbose=False)
    return module.seen, said


@pytest.mark.parametrize(("mode", "number"), [("max_size", 15 + 17), ("min_size", 15 + 16)])
def test_loaders_that_are_read_together(mode: str, number: int, ranks: Any) -> None:
    """Ranks need as many of each: the steps of one could not be run with what another one has."""
    for seen, said in ranks(2).run(seen_together, mode, deadline=60):
        assert seen == number
        assert len(said) == 2
        assert "29 samples are dealt out to 2 ranks, 15 to each: 1 more" in said[0]


def test_fewer_samples_than_ranks(ranks: Any) -> None:
    """There has to be a batch for each rank."""
    for found in ranks(2).run(evaluated, "fsdp_custom", 2, "", 1, deadline=60):
        assert found[0]["count"] == 2
