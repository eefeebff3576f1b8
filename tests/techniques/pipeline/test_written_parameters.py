"""A step that writes into parameters under a pipeline, which would write once for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.models.cases import ByteGPT, next_token_loss
from tests.parity import TOLERANCE, once, train_module, worst


class RunningMean(ByteGPT):
    """Keeps a mean over steps in a parameter, in one of three ways to write it, before the layers or after them."""

    def __init__(self, place: str, way: str) -> None:
        super().__init__("sgd")
        self.place, self.way = place, way
        self.kept = nn.Parameter(torch.ones(3), requires_grad=False)

    @torch.no_grad()
    def keep(self, value: Any) -> None:
        if self.way == "assigned":
            self.kept.data = self.kept.data * 0.9 + value
        else:
            (self.kept if self.way == "counted" else self.kept.data).mul_(0.9).add_(value)

    def loss(self, tokens: Tensor) -> Tensor:
        if self.place == "before":
            self.keep(0.5)
        logits = self(tokens)
        loss = next_token_loss(logits * self.kept.mean(), tokens)
        if self.place == "after":
            self.keep(logits.detach().mean())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "hook" and self.way != "assigned":
            self.keep(0.5)


class Shortened(ByteGPT):
    """Rows of the embedding are shortened when they are used, which is the same however often it is done."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.model.tokens.max_norm = 2.0


def refusal(place: str, way: str, strategy: str, num_ranks: int) -> str:
    try:
        train_module(lambda: RunningMean(place, way), batches("byte_gpt", num_ranks // 2), strategy, num_ranks)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("way", ["counted", "uncounted", "assigned"])
def test_writes_of_each_microbatch_are_refused(ranks: Any, place: str, way: str) -> None:
    found = ranks(2).run(refusal, place, way, "pp_custom", 2)
    assert all("the step writes into kept, and a pipeline runs it once for each microbatch" in each for each in found)


@pytest.mark.parametrize(
    ("way", "strategy"),
    [("counted", "fsdp_custom:pipeline=2,loss=microbatch"), ("assigned", "fsdp_custom:pipeline=2")],
)
def test_writes_into_gathered_parameters_are_refused(ranks: Any, way: str, strategy: str) -> None:
    found = ranks(4).run(refusal, "before", way, strategy, 4)
    assert any("the step writes into kept, and a pipeline runs it once" in each for each in found)


def trained(make: Any, args: tuple[Any, ...], strategy: str, num_ranks: int) -> Any:
    readers = 1 if num_ranks < 4 else 2
    return train_module(lambda: make(*args), batches("byte_gpt", readers), strategy, num_ranks)


@pytest.mark.parametrize(
    ("make", "args", "strategy", "size"),
    [
        (RunningMean, ("hook", "counted"), "pp_custom", 2),
        (RunningMean, ("hook", "uncounted"), "fsdp_custom:pipeline=2", 4),
        (Shortened, (), "pp_custom", 2),
    ],
)
def test_writes_of_each_step_are_right(ranks: Any, make: Any, args: Any, strategy: str, size: int) -> None:
    expected = once(trained, make, args, "auto", 1)
    assert worst(ranks(size).run(trained, make, args, strategy, size)[0], expected) < TOLERANCE
