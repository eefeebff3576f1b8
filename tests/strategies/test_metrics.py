"""Metrics count each sample once, wherever they are updated: not once for each rank that shares it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch.distributed as dist
from torchmetrics import SumMetric

from lightning_parallel.presets import PRESETS
from lightning_parallel.strategies.metric_sync import metrics_synced_over
from tests.jobs.metrics import SAMPLES, counted
from tests.names import num_ranks, num_readers
from tests.parity import TOLERANCE, once

PRODUCTS = [
    ("fsdp_custom:pipeline=2,microbatches=2", 4, 2),
    ("hsdp_custom:context=2", 4, 2),
    ("pp_custom:schedule=zbv", 2, 1),
]
"""A name with options, the number of ranks, and how many of them read different samples."""
NAMES = [(name, num_ranks(name), num_readers(name, num_ranks(name))) for name in PRESETS if name != "dp_custom"]


@pytest.mark.parametrize(("name", "size", "readers"), [*NAMES, *PRODUCTS], ids=str)
def test_each_sample_counts_once(name: str, size: int, readers: int, ranks: Any) -> None:
    expected = once(counted, "auto", 1, 1)
    assert {expected["found"][f"train_{key}"] for key in ("before", "after", "in_hook", "plain")} == {SAMPLES}
    for ours in ranks(size).run(counted, name, size, readers):
        for key in ("found", "logged", "tested"):
            assert ours[key] == pytest.approx(expected[key], abs=TOLERANCE), key
        assert ours["steps"] == expected["steps"]


def test_in_one_process() -> None:
    expected = once(counted, "auto", 1, 1)
    ours = counted("dp_custom", 1, 1)
    assert ours["found"] == pytest.approx(expected["found"], abs=TOLERANCE)
    assert ours["tested"] == pytest.approx(expected["tested"], abs=TOLERANCE)


def synced_by_hand(value: float) -> dict[str, Any]:
    """A metric in a context over one rank alone, and what is left of that context."""
    metric, given = SumMetric(), SumMetric(process_group=dist.group.WORLD)
    metric.update(value)
    given.update(value)
    own = SumMetric.sync
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with metrics_synced_over(alone):
        metric.sync()
        found = {"inside": float(metric.sum_value), "given": float(given.compute())}
        metric.unsync()
        copies = copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))
        found["copies"] = [float(each.compute()) for each in copies]
    return {**found, "outside": float(metric.compute()), "undone": SumMetric.sync is own}


def test_metrics_with_a_group_of_their_own_keep_it(ranks: Any) -> None:
    for found in ranks(2).run(synced_by_hand, 3.0):
        assert found == {"inside": 3.0, "given": 6.0, "copies": [3.0, 3.0], "outside": 6.0, "undone": True}
