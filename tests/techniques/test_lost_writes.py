"""What a step writes into gathered parameters would be lost: it is right, or refused before its update."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import ConfigurationError, full_state_dict
from tests.data import batches
from tests.models.cases import GPT, ByteGPT, next_token_loss
from tests.parity import TOLERANCE, difference, once, train_module, trainer_for, worst

PLACES = ("training_step", "on_before_zero_grad", "on_train_batch_end")


class Momentum(ByteGPT):
    """A teacher follows its student, as MoCo writes it."""

    def __init__(self, place: str, in_place: bool = False) -> None:
        super().__init__("sgd")
        self.place, self.in_place = place, in_place
        self.model = GPT()
        self.teacher = copy.deepcopy(self.model).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for p, k in zip(self.model.parameters(), self.teacher.parameters(), strict=True):
            if self.in_place:
                k.data.mul_(0.6).add_(p.data, alpha=0.4)
            else:
                k.data = k.data * 0.6 + p.data * 0.4

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(tokens).softmax(-1)
        return next_token_loss(self.model(tokens), tokens) + (self.model(tokens).softmax(-1) - target).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.place == "training_step":
            self.follow()
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.place == "on_before_zero_grad":
            self.follow()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "on_train_batch_end":
            self.follow()


class ClippedWeights(ByteGPT):
    """Weights are clipped at the begin of each step (Arjovsky et al. 2017)."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.model.head.parameters():
            parameter.data.clamp_(-0.05, 0.05)
        return super().training_step(batch, batch_idx)


class WithoutBackward(ByteGPT):
    """Every second step has no backward, and a hook shrinks weights after each."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx % 2:
            self.manual_backward(loss)
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            assert parameter.dtype == torch.float32, "rounded, as the step computes with it"
            parameter.mul_(0.9)


class NotANumber(ByteGPT):
    """A frozen table with entries that are no numbers is written by nobody."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.table = nn.Parameter(torch.tensor([float("nan"), 1.0, 2.0, 3.0]), requires_grad=False)

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + self.table[1:].sum()


def outcome_or_words(make: Any, args: tuple[Any, ...], strategy: str, **kwargs: Any) -> Any:
    try:
        return train_module(lambda: make(*args), batches("byte_gpt", 2), strategy, 2, **kwargs)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom", "fsdp_custom:layers=[]", "hsdp_custom"])
def test_momentum_is_right_or_refused(ranks: Any, strategy: str, place: str, in_place: bool) -> None:
    found = ranks(2).run(outcome_or_words, Momentum, (place, in_place), strategy)
    if isinstance(found[0], str):
        assert all("the change would be lost" in each for each in found)
        assert place != "on_train_batch_end"
        return
    expected = once(outcome_or_words_alone, place, in_place)
    assert worst(found[0], expected) <= TOLERANCE


def outcome_or_words_alone(place: str, in_place: bool) -> Any:
    return train_module(lambda: Momentum(place, in_place), batches("byte_gpt", 1), "auto", 1)


def weights_without_backward(strategy: str, size: int, precision: str) -> Any:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, size, precision=precision)
    trainer.fit(WithoutBackward(), batches("byte_gpt", size))
    return full_state_dict(trainer)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom"])
def test_a_hook_writes_after_a_step_without_backward(ranks: Any, strategy: str) -> None:
    found = ranks(2).run(weights_without_backward, strategy, 2, "32-true")
    assert difference(found[0], once(weights_without_backward, "auto", 1, "32-true")) <= TOLERANCE


def test_a_hook_reads_what_no_step_has_rounded(ranks: Any) -> None:
    ranks(2).run(weights_without_backward, "fsdp_custom", 2, "bf16-mixed")


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom", "fsdp_custom:reshard=never"])
def test_clipped_weights_are_refused(ranks: Any, strategy: str) -> None:
    found = ranks(2).run(outcome_or_words, ClippedWeights, (), strategy)
    assert "the step writes into model.head.weight while they are gathered" in found[0]


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("fsdp_custom", "32-true"), ("fsdp_custom:offload=all", "32-true"), ("zero2_custom", "bf16-mixed")],
)
def test_entries_that_are_no_numbers_are_no_writes(ranks: Any, strategy: str, precision: str) -> None:
    found = ranks(2).run(outcome_or_words, NotANumber, (), strategy, precision=precision)
    assert not isinstance(found[0], str), found[0]
