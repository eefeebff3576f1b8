"""What a step logs of a metric is its value for the batch, where a pipeline gives it one microbatch after the other."""

from __future__ import annotations

import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_parallel.strategies.metric_values import BatchValues
from tests.data import loader
from tests.models.cases import VOCABULARY, next_token_loss
from tests.models.pipelined import DeepTied
from tests.parity import once, trainer_for


class Shows(DeepTied):
    """Logs in each step what metrics say of its batch; none of them is a mean over samples."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.f1 = MulticlassF1Score(VOCABULARY)
        self.both = nn.ModuleDict(
            {"of": MetricCollection([MulticlassF1Score(VOCABULARY), MulticlassAccuracy(VOCABULARY)])}
        )
        self.each = ClasswiseWrapper(MulticlassAccuracy(VOCABULARY, average=None))
        self.mean, self.rows, self.error = MeanMetric(), CatMetric(), MeanSquaredError()
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        predicted, known = logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten()
        self.f1(predicted, known)
        self.log("f1", self.f1, on_step=True, on_epoch=True)
        self.both["of"](predicted, known)
        self.log_dict(self.both["of"], on_step=True, on_epoch=False)
        self.each.update(predicted, known)
        self.mean(loss.detach(), weight=len(batch[0]))
        self.log("mean", self.mean)
        self.rows(logits.detach().mean((1, 2)))
        self.error(logits, torch.zeros_like(logits))
        self.log("error", self.error, on_step=True, on_epoch=False)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def on_train_epoch_end(self) -> None:
        found = {name: float(value) for name, value in self.each.compute().items()}
        self.steps.append({**found, "rows": float(self.rows.compute().std())})


def shown(strategy: str, num_ranks: int) -> tuple[list[dict[str, float]], dict[str, float]]:
    """What each step has shown on this rank, and what the fit has in the end."""
    L.seed_everything(3, verbose=False)
    module = Shows()
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(module, loader(1))
    return module.steps, {name: float(value) for name, value in trainer.callback_metrics.items()}


NAMES = ["pp_custom", "pp_custom:schedule=zbv", "pp_custom:loss=batch", "pp_custom:schedule=turns", "tp_custom"]


@pytest.mark.parametrize("name", [*NAMES, "cp_custom"])
def test_a_step_shows_its_batch(ranks: Any, name: str) -> None:
    steps, end = once(shown, "auto", 1)
    assert "f1_step" in steps[0]
    for own_steps, own_end in ranks(2).run(shown, name, 2):
        for own, expected in zip(own_steps, steps, strict=True):
            assert own == pytest.approx(expected, rel=1e-6, abs=1e-6)
        assert own_end == pytest.approx(end, abs=1e-6)


class Counted(Metric):
    """Rows, and a lock, with which nothing can be copied; counts its updates."""

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.lock = threading.Lock()

    def update(self, rows: Tensor) -> None:
        self.rows.append(rows)

    def compute(self) -> Tensor:
        return torch.cat(self.rows).sum()


def test_states_are_those_of_this_step_alone() -> None:
    metric = Counted()
    metric(torch.full((3,), 5.0))
    values = BatchValues({"rows": metric})
    with values.noted():
        with values.part():
            metric(torch.ones(2))
        with values.paused():
            metric(torch.full((2,), 9.0))
        with values.part():
            metric(torch.ones(3))
    assert not metric._forward_hooks
    values.show()
    assert metric._forward_cache == 5.0
    assert metric.update_count == 4
    assert metric.compute() == 15.0 + 18.0 + 5.0


def test_the_second_call_in_a_step_is_another_one() -> None:
    metric = MeanMetric()
    values = BatchValues({"mean": metric})
    with values.noted():
        for low, high in ((1.0, 3.0), (2.0, 6.0)):
            with values.part():
                metric(low)
                metric(high)
    values.show()
    assert metric._forward_cache == 4.5
    assert metric.compute() == 3.0


def test_a_value_with_a_graph() -> None:
    metric = MeanSquaredError()
    values = BatchValues({"error": metric})
    with values.noted():
        for _ in range(2):
            with values.part():
                metric(torch.ones(2, requires_grad=True), torch.zeros(2)).backward()
    values.show()
    assert metric._forward_cache == 1.0
