"""Values that are logged before the last layer has run, where another stage than the last computes them."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import Tensor

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.models.cases import next_token_loss
from tests.models.pipelined import Deep
from tests.parity import TOLERANCE, once, trainer_for


class Logs(Deep):
    """Logs the mean size of what layers return: in its forward, in hooks on them, or what they have kept."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        for number, block in enumerate(self.model.blocks):
            if place in ("hook", "attribute"):
                block.register_forward_hook(lambda layer, _, result, number=number: self.see(layer, number, result))

    def see(self, layer: Any, number: int, result: Tensor) -> None:
        value = result.detach().abs().mean(-1).mean()
        if self.place == "hook" and self.training:
            self.log(f"size_{number}", value, on_step=False, on_epoch=True, reduce_fx="sum")
        else:
            layer.size = value

    def loss(self, tokens: Tensor) -> Tensor:
        model = self.model
        hidden = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
        if self.place == "before":
            self.log("size", hidden.detach().abs().mean())
        for number, block in enumerate(model.blocks):
            hidden = block(hidden)
            if self.place == "between":
                self.log(f"size_{number}", hidden.detach().abs().mean())
        if self.place == "attribute":
            self.log_dict({f"size_{number}": block.size for number, block in enumerate(model.blocks)})
        return next_token_loss(model.head(model.norm(hidden)), tokens)


def logged(place: str, strategy: str, num_ranks: int, readers: int) -> dict[str, float]:
    """All that is logged in the end, on this rank."""
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(Logs(place), batches("byte_gpt", readers))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def refusal(place: str, strategy: str, num_ranks: int, readers: int) -> str:
    try:
        logged(place, strategy, num_ranks, readers)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("strategy", "size"), [("pp_custom", 2), ("tp_custom:tensor=2,pipeline=2", 4)])
@pytest.mark.parametrize("place", ["before", "between", "attribute"])
def test_it_is_the_value_of_one_process_on_all_ranks(ranks: Any, place: str, strategy: str, size: int) -> None:
    expected = once(logged, place, "auto", 1, 1)
    for found in ranks(size).run(logged, place, strategy, size, 1):
        assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("strategy", "size"), [("pp_custom:schedule=turns", 2), ("tp_custom:tensor=2,pipeline=2,schedule=turns", 4)]
)
@pytest.mark.parametrize("place", ["hook", "between", "attribute"])
def test_where_stages_take_turns_all_ranks_have_it(ranks: Any, place: str, strategy: str, size: int) -> None:
    """What layers of another rank logged was missing, without a word."""
    expected = once(logged, place, "auto", 1, 1)
    for found in ranks(size).run(logged, place, strategy, size, 1):
        assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("strategy", ["ddp_custom", "fsdp_custom", "tp_custom", "tp_custom:check=first_step"])
def test_what_layers_log_while_they_are_looked_at_is_no_part_of_the_step(ranks: Any, strategy: str) -> None:
    readers = 1 if strategy.startswith("tp") else 2
    expected = once(logged, "hook", "auto", 1, 1)
    for found in ranks(2).run(logged, "hook", strategy, 2, readers):
        assert found.keys() == expected.keys()
        if readers == 1:
            assert found == pytest.approx(expected, abs=TOLERANCE)


class LogsMetric(Deep):
    """Logs a metric in a hook on a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.size = torchmetrics.MeanMetric()
        self.model.blocks[0].register_forward_hook(self.see)

    def see(self, layer: Any, given: Any, result: Tensor) -> None:
        self.size.update(result.detach().abs().mean())
        self.log("size", self.size)


def refused_metric(strategy: str) -> str:
    try:
        trainer_for(strategy, 2).fit(LogsMetric(), batches("byte_gpt", 1))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_metric_that_a_layer_logs_is_refused(ranks: Any) -> None:
    for message in ranks(2).run(refused_metric, "pp_custom:schedule=turns"):
        assert "a layer logs the metric 'size'" in message


@pytest.mark.parametrize(("strategy", "size", "readers"), [("pp_custom", 2, 1), ("fsdp_custom:pipeline=2", 4, 2)])
def test_in_a_layer_it_is_refused_on_all_ranks(ranks: Any, strategy: str, size: int, readers: int) -> None:
    for message in ranks(size).run(refusal, "hook", strategy, size, readers):
        assert "self.log('size_0') at" in message
        assert "keep the value in an attribute of the layer" in message
