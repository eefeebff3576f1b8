"""A loss that is a mean over samples in the first step may be another one later: steps 4, 16 and so on say so."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from lightning_parallel.module.plain_copy import PlainCopy
from lightning_parallel.strategies import compared_strategy
from tests.data import batches
from tests.jobs.losses import lines
from tests.models.cases import ByteGPT, next_token_loss
from tests.models.faults import ComparesSamples, SumOfSamples, WithDropout
from tests.names import num_ranks, num_readers
from tests.parity import Outcome, checked, difference, train_module

OTHER = "is not the mean of the losses of its parts"


class FromStep(ByteGPT):
    """A loss to which another one comes from a step on; the number of the step, from 0.

    Args:
        begin: That step.
        late: A module with that loss.
    """

    def __init__(self, begin: int = 2, late: type[ByteGPT] = ComparesSamples) -> None:
        super().__init__()
        self.begin, self.late = begin, late

    def loss(self, tokens: Tensor) -> Tensor:
        found = super().loss(tokens)
        return found if self.trainer.global_step < self.begin else found + self.late.loss(self, tokens)


class SwitchedByHook(FromStep):
    """The same, where a hook notes that it has begun."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = False

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.has_begun = self.trainer.global_step >= self.begin

    def loss(self, tokens: Tensor) -> Tensor:
        found = ByteGPT.loss(self, tokens)
        return found + self.late.loss(self, tokens) if self.has_begun else found


class KeepsOutputs(FromStep):
    """A module that collects what its steps return, with their graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def loss(self, tokens: Tensor) -> Tensor:
        self.outputs.append(super().loss(tokens))
        return self.outputs[-1]


class KeepsActivations(ByteGPT):
    """A module that leaves what it has computed in an attribute."""

    def loss(self, tokens: Tensor) -> Tensor:
        self.features = self.model(tokens)
        return next_token_loss(self.features, tokens)


class KeepsALot(FromStep):
    """A module with a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(1 << 25)


class NotYetSeen(FromStep):
    """A module of whose first step nobody can say what its loss is: Python draws it."""

    def loss(self, tokens: Tensor) -> Tensor:
        found = ByteGPT.loss(self, tokens)
        is_late = self.trainer.global_step >= self.begin
        return found + self.late.loss(self, tokens) if is_late else found * (0.5 + random.random())


class FollowsItsLoss(FromStep):
    """A module whose step writes a buffer that has a graph, and a hook that makes it plain again."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running", torch.zeros(()))

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.running = 0.9 * self.running + loss
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.running = self.running.detach()


class Grows(FromStep):
    """A module to which a hook adds a layer that nobody uses."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self.added = nn.Linear(2, 2)


def told(make: Callable[[], ByteGPT], name: str, steps: int = 4, **kwargs: Any) -> list[str]:
    """What is said of the losses of a fit."""
    size = num_ranks(name)
    with lines() as found:
        train_module(make, batches("byte_gpt", num_readers(name, size), steps), checked(name), size, **kwargs)
    return found


def late_sum() -> FromStep:
    return FromStep(2, SumOfSamples)


@pytest.mark.parametrize("make", [FromStep, SwitchedByHook, KeepsOutputs])
@pytest.mark.parametrize("name", ["ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "fsdp_tp_custom"])
def test_a_loss_that_comes_in_later_is_told_in_step_4(ranks: Any, make: Any, name: str) -> None:
    first, *others = ranks(num_ranks(name)).run(told, make, name)
    assert len(first) == 1
    assert first[0].startswith("in step 4, the loss of a batch (")
    assert OTHER in first[0]
    assert first[0].endswith("In step 1, the two were the same")
    assert not any(others)


def test_a_sum_of_two_losses_of_which_one_is_a_sum_is_no_mean(ranks: Any) -> None:
    assert OTHER in ranks(2).run(told, late_sum, "ddp_custom")[0][0]


def later() -> FromStep:
    return FromStep(5)


def test_steps_4_and_16_are_looked_at(ranks: Any) -> None:
    first = ranks(2).run(told, later, "ddp_custom", 16)[0]
    assert len(first) == 1
    assert first[0].startswith("in step 16, ")
    assert first[0].endswith("In step 4, the two were the same")
    assert not any(ranks(2).run(told, later, "ddp_custom", 15))


def test_a_step_is_an_update(ranks: Any) -> None:
    first = ranks(2).run(told, FromStep, "ddp_custom", 8, accumulate_grad_batches=2)[0]
    assert len(first) == 1
    assert first[0].startswith("in step 4, ")
    assert not any(ranks(2).run(told, FromStep, "ddp_custom", 6, accumulate_grad_batches=2))


@pytest.mark.parametrize("make", [ByteGPT, WithDropout])
def test_means_are_not_told_of(ranks: Any, make: Any) -> None:
    assert not any(ranks(2).run(told, make, "ddp_custom", 16))


def test_what_was_told_of_the_first_step_is_told_once(ranks: Any) -> None:
    assert len(ranks(2).run(told, ComparesSamples, "ddp_custom", 5)[0]) == 1


def test_a_module_that_has_grown_is_not_looked_at(ranks: Any) -> None:
    first, *others = ranks(2).run(told, Grows, "ddp_custom", 16)
    assert len(first) == 1
    assert first[0].startswith("losses of later steps are not looked at: hooks have added 'added' to it")
    assert not any(others)


def outcomes(make: Callable[[], ByteGPT], name: str) -> tuple[Outcome, Outcome]:
    """What a fit of five steps with looks makes, and one without any."""
    size = num_ranks(name)
    loader = batches("byte_gpt", num_readers(name, size), 5)
    looked = train_module(make, loader, checked(name), size)
    return looked, train_module(make, loader, f"{name}:check=off", size)


@pytest.mark.parametrize("make", [WithDropout, SwitchedByHook])
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_looks_leave_nothing_behind(ranks: Any, make: Any, name: str) -> None:
    (looked, left), (others_looked, others_left) = ranks(2).run(outcomes, make, name)
    assert looked.losses == left.losses
    assert difference(looked.final, left.final) == 0.0
    assert others_looked.losses == others_left.losses


def held(make: Callable[[], ByteGPT], name: str) -> list[int]:
    """The elements that a copy holds behind each time that it is emptied."""
    found: list[int] = []
    empty = PlainCopy.empty

    def noted(self: PlainCopy) -> None:
        before = sum(each.numel() for each in self.module.parameters())
        empty(self)
        left = [*self.module.parameters(), *self.module.buffers()]
        found.extend([before, sum(each.numel() + (each.grad is not None) for each in left) + self.held_bytes()])

    with mock.patch.object(PlainCopy, "empty", noted):
        told(make, name, 5)
    return found


@pytest.mark.parametrize("make", [ByteGPT, KeepsActivations])
def test_between_looks_a_copy_holds_no_memory(ranks: Any, make: Any) -> None:
    size = sum(each.numel() for each in ByteGPT().parameters())
    assert ranks(2).run(held, make, "fsdp_custom")[0] == [size, 0, size, 0]


def test_a_copy_that_holds_a_lot_is_not_kept(ranks: Any) -> None:
    (first,) = ranks(2).run(told, KeepsALot, "ddp_custom")[0]
    assert first == "losses of later steps are not looked at: its attributes hold 128 MiB"


def test_what_nobody_could_say_is_not_said_to_have_been_the_same(ranks: Any) -> None:
    (first,) = ranks(2).run(told, NotYetSeen, "ddp_custom")[0]
    assert first.startswith("in step 4, the loss of a batch (")
    assert "the two were the same" not in first


def test_what_cannot_be_followed_ends_no_fit(ranks: Any) -> None:
    (first,) = ranks(2).run(told, FollowsItsLoss, "ddp_custom")[0]
    assert first.startswith(("in step 4, ", "losses of later steps are not looked at: "))


def told_with_room(bytes_of_parameters: float) -> list[str]:
    """What is said where a copy may have so many bytes in step 4, as a share of the parameters; with ``check=auto``."""
    size = sum(each.numel() * each.itemsize for each in ByteGPT().parameters())
    with mock.patch.object(compared_strategy, "free_memory", return_value=1 << 40) as free, lines() as found:

        class Fills(FromStep):
            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                free.return_value = int(bytes_of_parameters * size) * 2 * 2

        train_module(Fills, batches("byte_gpt", 2, 4), "fsdp_custom:check=auto", 2)
    return found


def test_a_copy_that_fits_no_more_is_not_made(ranks: Any) -> None:
    (fits,) = ranks(2).run(told_with_room, 1.0)[0]
    assert OTHER in fits
    (full,) = ranks(2).run(told_with_room, 0.99)[0]
    assert full.startswith("losses of later steps are not looked at: a copy of the module does not fit beside it")


def test_nothing_is_looked_at_without_the_check(ranks: Any) -> None:
    assert not any(ranks(2).run(told_without, "ddp_custom:check=off"))


def told_without(name: str) -> list[str]:
    with lines() as found:
        train_module(FromStep, batches("byte_gpt", 2, 4), name, 2)
    return found
