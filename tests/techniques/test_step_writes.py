"""What a step writes into gathered parameters goes into the shards, or is refused before its update."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel import ConfigurationError
from tests.data import STEPS, batches
from tests.models.cases import GPT, ByteGPT, next_token_loss
from tests.parity import TOLERANCE, checked, once, train_module, worst

PLACES = ("training_step", "training_step with a hook", "on_before_zero_grad", "on_train_batch_end")


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
        if self.place.startswith("training_step"):
            self.follow()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.place == "on_train_batch_end":
            self.follow()


class Hooked(Momentum):
    """With a hook between forward and backward, for which what was gathered is freed there."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.place == "on_before_zero_grad":
            self.follow()


class ClippedWeights(ByteGPT):
    """Weights are clipped at the begin of each step (Arjovsky et al. 2017), in one of three ways to write it."""

    def __init__(self, way: str) -> None:
        super().__init__("sgd")
        self.way = way

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for parameter in self.model.head.parameters():
            if self.way == "assigned":
                parameter.data = parameter.data.clamp(-0.05, 0.05)
            else:
                with torch.no_grad():
                    (parameter if self.way == "counted" else parameter.data).clamp_(-0.05, 0.05)
        return super().training_step(batch, batch_idx)


class Late(Momentum):
    """The teacher begins to follow in the sixth step."""

    def follow(self) -> None:
        if self.global_step >= 5:
            super().follow()


class Manual(Momentum):
    """The same, optimized by hand."""

    def __init__(self, in_place: bool) -> None:
        super().__init__("training_step", in_place)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(output)
        optimizer.step()
        return output


class OwnSamples(ByteGPT):
    """Each rank writes the mean of its own samples."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.seen = nn.Parameter(torch.zeros(4), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.data = self.seen.data + batch[0].float().mean()
        return super().training_step(batch, batch_idx)


class NotANumber(ByteGPT):
    """A frozen table with entries that are no numbers is written by nobody."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.table = nn.Parameter(torch.tensor([float("nan"), 1.0, 2.0, 3.0]), requires_grad=False)

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + self.table[1:].sum()


def outcome_or_words(make: Any, args: tuple[Any, ...], strategy: str, steps: int = STEPS, **kwargs: Any) -> Any:
    try:
        return train_module(lambda: make(*args), batches("byte_gpt", 2, steps), strategy, 2, **kwargs)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom", "fsdp_custom:layers=[]", "hsdp_custom"])
def test_momentum_is_that_of_one_process(ranks: Any, strategy: str, place: str, in_place: bool) -> None:
    make = Momentum if place in ("training_step", "on_train_batch_end") else Hooked
    found = ranks(2).run(outcome_or_words, make, (place, in_place), checked(strategy))
    expected = once(alone, make, (place, in_place))
    assert not isinstance(found[0], str), found[0]
    assert worst(found[0], expected) <= TOLERANCE


def alone(make: Any, args: tuple[Any, ...], steps: int = STEPS, **kwargs: Any) -> Any:
    return train_module(lambda: make(*args), batches("byte_gpt", 1, steps), "auto", 1, **kwargs)


@pytest.mark.parametrize("way", ["counted", "uncounted", "assigned"])
@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom"])
def test_clipped_weights_are_those_of_one_process(ranks: Any, strategy: str, way: str) -> None:
    found = ranks(2).run(outcome_or_words, ClippedWeights, (way,), strategy)
    assert not isinstance(found[0], str), found[0]
    assert worst(found[0], once(alone, ClippedWeights, (way,))) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom"])
def test_writes_in_a_window_of_several_steps(ranks: Any, strategy: str) -> None:
    args = ("training_step", False)
    found = ranks(2).run(outcome_or_words, Momentum, args, strategy, accumulate_grad_batches=2)
    assert not isinstance(found[0], str), found[0]
    assert worst(found[0], once(alone, Momentum, args, accumulate_grad_batches=2)) <= TOLERANCE


@pytest.mark.parametrize("in_place", [False, True])
def test_writes_under_manual_optimization(ranks: Any, in_place: bool) -> None:
    found = ranks(2).run(outcome_or_words, Manual, (in_place,), "fsdp_custom")
    assert not isinstance(found[0], str), found[0]
    assert worst(found[0], once(alone, Manual, (in_place,))) <= TOLERANCE


@pytest.mark.parametrize("in_place", [False, True])
def test_writes_that_begin_late_are_right_or_refused(ranks: Any, in_place: bool) -> None:
    """What is written in place through ``.data`` shows in values only, and these are looked at ever more rarely."""
    found = ranks(2).run(outcome_or_words, Late, ("training_step", in_place), "fsdp_custom", 9)
    if in_place:
        assert all("has begun to between its runs 4 and 8" in each for each in found)
    else:
        assert worst(found[0], once(alone, Late, ("training_step", False), 9)) <= TOLERANCE


def test_values_of_own_samples_are_refused(ranks: Any) -> None:
    found = ranks(2).run(outcome_or_words, OwnSamples, (), "fsdp_custom")
    assert all("the step writes into seen while they are gathered, on each rank" in each for each in found)


def test_rounded_values_are_refused(ranks: Any) -> None:
    args = ("training_step", False)
    found = ranks(2).run(outcome_or_words, Momentum, args, "fsdp_custom", precision="bf16-mixed")
    assert all("gathered in torch.bfloat16, but their shards are torch.float32" in each for each in found)


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [("fsdp_custom", "32-true"), ("fsdp_custom:offload=all", "32-true"), ("zero2_custom", "bf16-mixed")],
)
def test_entries_that_are_no_numbers_are_no_writes(ranks: Any, strategy: str, precision: str) -> None:
    found = ranks(2).run(outcome_or_words, NotANumber, (), strategy, precision=precision)
    assert not isinstance(found[0], str), found[0]


class Pair(nn.Module):
    """A student, and a teacher that a method lets follow.

    Args:
        way: How the method writes.
    """

    def __init__(self, way: str) -> None:
        super().__init__()
        self.student, self.teacher, self.way = nn.Linear(16, 16), nn.Linear(16, 16), way

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.student(hidden)

    def follow(self) -> None:
        for own, following in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if self.way == "assigned":
                following.data = 0.6 * following.data + 0.4 * own.data
            elif self.way == "in place":
                following.data.lerp_(own.data, 0.4)
            else:
                with torch.no_grad():
                    following.lerp_(own, 0.4)


class Pairs(ByteGPT):
    """Layers of which the step calls a method that writes, each of them a unit of its own."""

    def __init__(self, way: str) -> None:
        super().__init__("sgd")
        self.pairs = nn.ModuleList([Pair(way), Pair(way)])

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens)
        distance = hidden.new_zeros(())
        for pair in self.pairs:
            hidden = pair(hidden)
            distance = distance + (hidden - pair.teacher(hidden).detach()).square().mean()
            pair.follow()  # type: ignore[operator]
        return super().loss(tokens) + distance


def pairs(way: str, strategy: str, num_ranks: int) -> Any:
    try:
        return train_module(lambda: Pairs(way), batches("byte_gpt", num_ranks, STEPS), strategy, num_ranks)
    except ConfigurationError as error:
        return error.violations[0]


@pytest.mark.parametrize("way", ["assigned", "in place", "counted"])
def test_a_method_of_a_unit_that_writes_is_refused_or_kept(ranks: Any, way: str) -> None:
    for said in ranks(2).run(pairs, way, "fsdp_custom:layers=pairs", 2):
        assert said.startswith("follow writes into parameters while they are gathered")
        assert "layers=[]" in said
    kept = ranks(2).run(pairs, way, "fsdp_custom:layers=[]", 2)[0]
    assert worst(kept, pairs(way, "auto", 1)) < TOLERANCE
