"""Findings of a comparison of records, made by hand."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from lightning_parallel.ranks.random_streams import RandomState, data_rank_stream
from lightning_parallel.verification.certificate import Certificate, Finding
from lightning_parallel.verification.comparison import compare
from lightning_parallel.verification.records import Evaluation, Microstep, Record, fingerprint_of

pytestmark = pytest.mark.fast
CPU = torch.device("cpu")
WEIGHTS = [{"weight": torch.full((3,), float(step)), "mean": torch.zeros(1)} for step in range(3)]


def steps(reader: int) -> list[Microstep]:
    batches = [torch.arange(4) + 10 * reader + number for number in (0, 100)]
    random = data_rank_stream(reader, progress=0, device=CPU)
    return [Microstep(batch, fingerprint_of(batch), random, True, float(reader + 1)) for batch in batches]


def record(rank: int, reader: int, num_readers: int) -> Record:
    return Record(
        rank=rank,
        reader=reader,
        num_readers=num_readers,
        epochs=[steps(reader)],
        indices=list(range(reader, 8, num_readers)),
        num_samples=8,
        buffers={"mean"},
        weights=copy.deepcopy(WEIGHTS),
        logged={"synced": 1.0, "own": float(reader)},
        evaluations={"validate": Evaluation(values={"val": 2.0})},
        resumed=copy.deepcopy(WEIGHTS[-1]),
        saved_after=(1, 1),
        first_step="first step equals one process: loss 1 = 1",
    )


def two_readers() -> tuple[list[Record], Record]:
    """Two ranks, and one process that took the steps of both in turn."""
    records = [record(rank, rank, 2) for rank in range(2)]
    reference = record(0, 0, 1)
    reference.epochs = [[each for turn in zip(steps(0), steps(1), strict=True) for each in turn]]
    return records, reference


def outcomes(records: list[Record], reference: Record) -> dict[str, str]:
    return {each.subject: each.outcome for each in compare(records, reference, 1e-5)}


def differing(records: list[Record], reference: Record) -> str:
    (finding,) = (each for each in compare(records, reference, 1e-5) if each.outcome == "differs")
    return f"{finding.subject}: {finding.detail}"


def test_equal_records() -> None:
    found = compare(*two_readers(), 1e-5)
    assert {each.outcome for each in found} == {"equal"}
    texts = {each.subject: each.detail for each in found}
    assert texts["samples"] == "an epoch reads each of 8 samples once"
    assert texts["logged values"] == "synced; of each rank's own samples, so not compared: own"


@pytest.mark.parametrize(("change", "outcome"), [("", "equal"), ("wrong", "differs"), ("time", "not compared")])
def test_values_of_each_ranks_own_samples(change: str, outcome: str) -> None:
    records, reference = two_readers()
    for each in (*records, reference):
        each.logged = {"own": 7.0 + each.reader}
        for step in each.microsteps:
            step.logged = {"own": float(step.fingerprint)}
    for each in records:
        each.again = [dict(step.logged) for step in each.microsteps[1:]]
    if change:
        records[1].microsteps[1].logged["own"] += 1e6
    if change == "wrong":  # in each run of that rank
        records[1].again[0]["own"] += 1e6
    (found,) = (each for each in compare(records, reference, 1e-5) if each.subject == "logged values")
    assert found.outcome == outcome
    assert {"equal": "in each step", "differs": "in step 1, rank 1 has own", "not compared": "so not compared: own"}[
        outcome
    ] in found.detail


@pytest.mark.parametrize("change", ["", "step", "epoch", "validation"])
def test_values_that_are_reduced_over_ranks(change: str) -> None:
    """One process logs a value for each batch, and ranks their mean; values of epochs are compared at the end."""
    records, reference = two_readers()
    for each in (*records, reference):
        each.logged = {"mean": 5.0, "of_validation": 1.0}
        each.weights[-1]["mean"] += 1.0  # running statistics
    for number, step in enumerate(reference.microsteps):
        step.logged = {"mean": float(number)}
    for each in records:
        for number, step in enumerate(each.microsteps):
            step.logged = {"mean": 2 * number + 0.5}
        each.of_validation = {"of_validation"}
    if change == "step":
        for each in records:
            each.microsteps[1].logged["mean"] += 0.1
    if change == "epoch":
        reference.logged["mean"] = 5.1
    if change == "validation":
        reference.logged["of_validation"] = 1.1
    (found,) = (each for each in compare(records, reference, 1e-5) if each.subject == "logged values")
    assert (found.outcome == "differs") == (change in ("step", "epoch"))
    if found.outcome == "equal":
        assert found.detail == "mean; of each rank's own samples, so not compared: of_validation"


@pytest.mark.parametrize(("num_dropped", "outcome"), [(0, "differs"), (1, "equal")])
def test_samples_that_drop_last_leaves_out(num_dropped: int, outcome: str) -> None:
    records, reference = two_readers()
    for each in records:
        each.indices, each.num_dropped = (each.indices or [])[:3], num_dropped
    (found,) = (each for each in compare(records, reference, 1e-5) if each.subject == "samples")
    assert found.outcome == outcome
    if num_dropped:
        assert found.detail == "an epoch reads each of 8 samples once, without the last 2 (drop_last)"


def joined(loss: float | None) -> tuple[list[Record], Record]:
    """Two ranks that optimize by themselves, and one process that took their batches as one."""
    records = [record(rank, rank, 2) for rank in range(2)]
    reference = record(0, 0, 1)
    reference.takes = "joined"
    for each in (*records, reference):
        each.is_manual = True
        for step in each.microsteps:
            step.draws = False
    for step in reference.microsteps:
        step.loss = loss
    return records, reference


def test_batches_of_all_readers_as_one() -> None:
    records, reference = joined(1.5)  # the mean of 1 and 2
    for each in (*records, reference):
        each.logged = {"synced": 1.0, "own": 1.0}
        for step in each.microsteps:
            step.logged = {"synced": 1.0, "own": step.loss or 0.0}
    found = {each.subject: each for each in compare(records, reference, 1e-5)}
    assert (found["losses"].outcome, found["weights"].outcome) == ("equal", "equal")
    assert found["logged values"].detail == "in each step: synced; of each rank's own samples, so not compared: own"


def test_a_later_loss_that_is_not_the_mean() -> None:
    records, reference = joined(1.5)
    reference.microsteps[1].loss = 1.6
    assert differing(records, reference) == "losses: in step 1, the mean over ranks is 1.5, one process has 1.6"


@pytest.mark.parametrize("change", ["loss", "statistics", "draws", "first"])
def test_batches_that_cannot_be_joined(change: str) -> None:
    records, reference = joined(3.0 if change == "loss" else 1.5)
    if change == "statistics":
        records[0].weights[-1]["mean"] = torch.ones(1)
    if change == "draws":
        reference.microsteps[0].draws = True
    if change == "first":
        reference.takes = "first"
    found = outcomes(records, reference)
    assert found["losses and weights"] == "not compared"
    assert not {"losses", "weights"} & set(found)


def test_samples_that_are_left_out() -> None:
    records, reference = two_readers()
    records[1].indices = [1, 3, 5, 5]
    assert differing(records, reference) == "samples: of 8 samples an epoch leaves out 1 and reads 1 twice"


def test_samples_that_fill_up_the_last_batches() -> None:
    records, reference = two_readers()
    for each in records:
        each.num_samples = 7
    records[1].indices = [1, 3, 5, 0]
    assert set(outcomes(records, reference).values()) == {"equal"}


def test_ranks_that_are_the_same_reader() -> None:
    records, reference = two_readers()
    records[1].reader = 0
    words = "samples: ranks are to read 2 parts of the samples, and of these, rank 0 part 0, rank 1 part 0"
    assert differing(records, reference) == words


def test_losses_and_weights() -> None:
    records, reference = two_readers()
    records[1].epochs[0][1].loss = 7.0
    assert differing(records, reference) == "losses: in step 1, rank 1 has 7.0, one process has 2.0"
    records, reference = two_readers()
    records[0].weights[1]["weight"][0] = float("nan")
    assert differing(records, reference).startswith("weights: after update 1: weight by nan")
    records, reference = two_readers()
    records[0].weights[2]["mean"] += 1
    records[0].resumed["mean"] += 1  # the running statistics of one of two readers
    assert set(outcomes(records, reference).values()) == {"equal"}


def test_values_that_are_missing_or_other_ones() -> None:
    records, reference = two_readers()
    reference.evaluations["validate"].values["val"] = 3.0
    assert differing(records, reference) == "validate: val is 2.0 in place of 3.0"
    reference.evaluations["validate"].values = {"val": 2.0, "more": 1.0}
    assert differing(records, reference) == "validate: more is missing"


def test_streams_that_are_the_same() -> None:
    records, reference = two_readers()
    for step in records[1].epochs[0]:
        step.random = records[0].epochs[0][0].random
    assert differing(records, reference).startswith("random numbers: ranks 0 and 1 read different samples and draw the")


def test_a_run_that_resumes_elsewhere() -> None:
    records, reference = two_readers()
    records[0].resumed["weight"] = torch.zeros(3)
    assert differing(records, reference).startswith("resuming: from the checkpoint of update 1 to update 2: weight by")


def test_dropout_where_ranks_share_samples_is_not_compared() -> None:
    shared = [record(rank, 0, 1) for rank in range(2)]
    for each in shared:
        each.shares_samples = True
    assert outcomes(shared, record(0, 0, 1))["losses and weights"] == "not compared"


def test_a_certificate_that_compares_nothing_has_not_passed() -> None:
    certificate = Certificate("fsdp_custom", 2, 2, 0, "64-true", 1e-5, (Finding("losses", "not compared", "none"),))
    assert not certificate.has_passed
    assert certificate.to_text().splitlines()[-1] == "nothing was compared; 1 not compared"
    assert json.loads(certificate.to_json())["passed"] is False


def test_fingerprints() -> None:
    assert fingerprint_of([torch.ones(2), "a"]) == fingerprint_of([torch.ones(2), "a"])
    assert fingerprint_of(torch.ones(2)) != fingerprint_of(torch.ones(1, 2))
    assert isinstance(RandomState.take(CPU), RandomState)
