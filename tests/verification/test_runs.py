"""Runs under every name, verified."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.verification.comparison import compare
from tests.jobs.metrics import Counts
from tests.jobs.planted import recorded_with
from tests.jobs.verification import in_one_process, module_of, recorded
from tests.models.cases import ByteGPT
from tests.models.faults import WithDropout
from tests.models.planted import CountsPositions, DropsGradient, LosesSamples, MakesMasks, Unties
from tests.models.tables import MODULES
from tests.names import num_ranks, num_readers


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "tp_custom", "pp_custom"])
def test_equal(ranks: Any, tmp_path: Path, name: str) -> None:
    size = num_ranks(name)
    make = module_of("byte_gpt")
    records = ranks(size).run(recorded, make, "byte_gpt", name, size, num_readers(name, size), tmp_path)
    found = compare(records, in_one_process(make, records), 1e-5)
    for each in found:
        print(each)
    assert not [each for each in found if each.outcome == "differs"]


ADAMW = module_of("byte_gpt", "adamw")
PLANTED = [
    ("forgotten all-reduce", MODULES["bare_parameter"], "fsdp_custom:layers=model.blocks", "gradients differ"),
    ("wrong loss scale", ByteGPT, "ddp_custom", "gradients differ"),
    ("none", Unties, "ddp_custom", "after update 1: model.tokens.weight by 8e-01, model.head.weight by"),
    ("duplicated sampler", ByteGPT, "ddp_custom", "batches: ranks 0 and 1 read the same batch in step 0"),
    ("none", DropsGradient, "fsdp_custom", "weights: after update 1: model.head.weight by 1e+00"),
    ("wrong rotary position", CountsPositions, "cp_custom", "model.blocks"),
    ("none", MakesMasks, "cp_custom", "model.blocks"),
    ("metric counted twice", Counts, "tp_custom", "the metric 'before' has 16 in place of 8"),
    ("shifted across a cut", ByteGPT, "cp_custom", "model.blocks"),
    ("shared dropout seed", WithDropout, "ddp_custom", "random numbers: ranks 0 and 1 read different samples"),
    ("clipped by one rank's norm", ByteGPT, "fsdp_custom", "weights: after update 1"),
    ("optimizer not resumed", ADAMW, "fsdp_custom", "resuming: from the checkpoint of update 1"),
    ("none", LosesSamples, "ddp_custom", "losses: in step 0, rank 1 has 0.0, one process has"),
]


@pytest.mark.parametrize(("fault", "make", "strategy", "words"), PLANTED)
def test_a_planted_fault_is_named(ranks: Any, tmp_path: Path, fault: str, make: Any, strategy: str, words: str) -> None:
    readers = num_readers(strategy.partition(":")[0], 2)
    records = ranks(2).run(recorded_with, fault, make, strategy, 2, readers, tmp_path)
    if isinstance(records[0], str):
        found = records[0]
    else:
        findings = compare(records, in_one_process(make, records), 1e-5)
        found = "; ".join(f"{each.subject}: {each.detail}" for each in findings if each.outcome == "differs")
    print(found)
    assert words in found
