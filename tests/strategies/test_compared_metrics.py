"""States of metrics after the first step: those of one process, or the fit ends before an update."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from lightning_parallel.module.differences import Tolerance, state_differences
from lightning_parallel.strategies import while_set_up
from lightning_parallel.strategies.compared_metrics import follow_metrics, metric_differences, states_of_metrics
from lightning_parallel.strategies.step_metrics import StepMetrics
from tests.jobs.first_steps import ends_before_an_update, fit
from tests.jobs.metrics import Counts
from tests.models.faults import CountsInHooks, CountsTwice

FP32 = Tolerance(torch.finfo(torch.float32).eps)
BF16 = Tolerance(torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [
        ("ddp_custom", 2, 2),
        ("fsdp_custom", 2, 2),
        ("cp_custom", 2, 1),
        ("tp_custom", 2, 1),
        ("pp_custom:loss=microbatch", 2, 1),
        ("pp_custom:loss=batch", 2, 1),
        ("pp_custom:schedule=zbv", 2, 1),
        ("fsdp_custom:pipeline=2,microbatches=2", 4, 2),
    ],
)
def test_equal_states(ranks: Any, strategy: str, size: int, readers: int) -> None:
    _, lines = ranks(size).run(fit, Counts, "byte_gpt", strategy, size, readers)[0]
    assert len(lines) == 1
    assert lines[0].startswith("first step equals one process")
    assert lines[0].endswith("gradients, 13 metrics")


def synced_over_all_ranks(strategy: str) -> str:
    with mock.patch.object(while_set_up, "metrics_synced_over", return_value=contextlib.nullcontext()):
        return ends_before_an_update(Counts, strategy)


@pytest.mark.parametrize("strategy", ["cp_custom", "tp_custom", "pp_custom"])
def test_samples_that_ranks_share_and_each_counts(ranks: Any, strategy: str) -> None:
    words = ranks(2).run(synced_over_all_ranks, strategy)[0]
    assert "the metric 'before' has 16 in place of 8 in its state 'sum_value', added up over the ranks" in words
    assert "more metrics differ" in words
    assert "the loss is" not in words
    assert "gradients differ" not in words


def with_states_of_each_stage(strategy: str) -> str:
    with mock.patch.object(StepMetrics, "follow", return_value=None):
        return ends_before_an_update(Counts, strategy)


def with_updates_before_the_stack(strategy: str) -> str:
    with mock.patch.object(StepMetrics, "dropped", return_value=contextlib.nullcontext()):
        return ends_before_an_update(Counts, strategy)


def test_stages_that_do_not_count(ranks: Any) -> None:
    words = ranks(2).run(with_states_of_each_stage, "pp_custom")[0]
    assert "the metric 'after' has 0 in place of 8 in its state 'sum_value'" in words


def test_stages_of_one_rank_that_both_count(ranks: Any) -> None:
    words = ranks(2).run(with_updates_before_the_stack, "pp_custom:schedule=zbv,loss=microbatch")[0]
    assert "the metric 'before' has 16 in place of 8 in its state 'sum_value'" in words
    assert "'after'" not in words


@pytest.mark.parametrize("strategy", ["ddp_custom", "pp_custom"])
def test_hooks_around_backward(ranks: Any, strategy: str) -> None:
    readers = 2 if strategy == "ddp_custom" else 1
    _, lines = ranks(2).run(fit, CountsInHooks, "byte_gpt", strategy, 2, readers)[0]
    assert lines[0].startswith("first step equals one process")
    words = ranks(2).run(ends_before_an_update, CountsTwice, strategy)[0]
    assert "the metric 'counted' has 6 in place of 5 in its state 'sum_value'" in words
    assert "'elsewhere'" not in words  # a hook that does not run on the copy has been there in between


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.mean, self.rows = SumMetric(), MeanMetric(), CatMetric()
        self.both = MetricCollection([MulticlassAccuracy(4), MulticlassRecall(4)])
        self.plain = [SumMetric()]

    def count(self, values: Tensor) -> None:
        self.sum.update(values)
        self.mean.update(values)
        self.rows.update(values)
        self.both.update(values.long() % 4, (values.long() + values.long() // 5) % 4)
        self.plain[0].update(values)


def test_a_copy_follows_and_is_on_its_own() -> None:
    ours, plain = Holder(), Holder()
    ours.count(torch.arange(6.0))
    before = states_of_metrics(ours)
    assert metric_differences(before, states_of_metrics(plain), FP32)
    follow_metrics(plain, ours)
    assert metric_differences(before, states_of_metrics(plain), FP32) == []
    plain.count(torch.arange(6.0, 9.0))
    assert metric_differences(states_of_metrics(ours), before, FP32) == []  # nothing is shared
    ours.count(torch.arange(6.0, 9.0))
    assert metric_differences(states_of_metrics(ours), states_of_metrics(plain), FP32) == []
    assert float(plain.mean.compute()) == 4.0


def test_what_differs_is_named() -> None:
    ours, plain = Holder(), Holder()
    plain.count(torch.arange(8.0))
    for part in torch.arange(8.0).split(2):
        ours.count(part)  # microbatches
    assert metric_differences(states_of_metrics(ours), states_of_metrics(plain), FP32) == []
    ours.count(torch.arange(8.0))
    found = metric_differences(states_of_metrics(ours), states_of_metrics(plain), FP32)
    assert "the metric 'sum' has 56 in place of 28 in its state 'sum_value'" in found
    assert "the metric 'mean' has 56 in place of 28 in its state 'mean_value'" in found
    assert "the metric 'rows' has 16 entries in place of 8 in its state 'value'" in found
    assert found[-1] == "3 more metrics differ"


def test_rounding_is_no_difference() -> None:
    right = {"tp": torch.tensor([3, 4]), "total": torch.tensor(16), "mean": torch.tensor(1e-9), "sum": torch.ones(9)}
    assert state_differences({**right, "mean": torch.tensor(-1e-9)}, right, FP32) == {}  # of large numbers
    assert list(state_differences({**right, "tp": torch.tensor([2, 4])}, right, FP32)) == ["tp"]
    assert state_differences({**right, "tp": torch.tensor([2, 4])}, right, BF16) == {}  # another class
    assert list(state_differences({**right, "total": torch.tensor(32)}, right, BF16)) == ["total"]
    assert list(state_differences({**right, "sum": torch.ones(9) * 2.5}, right, BF16)) == ["sum"]
    assert list(state_differences({**right, "sum": torch.ones(9) * float("nan")}, right, FP32)) == ["sum"]
    large = {**right, "seen": torch.tensor(1e6)}
    assert list(state_differences({**large, "total": torch.tensor(32)}, large, FP32)) == ["total"]
