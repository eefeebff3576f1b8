"""Parts of a sharded unit that are called from outside of it: gathered around the call, or refused with what helps."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_parallel.module import layer_stacks
from tests.data import batches
from tests.jobs.fits import note_of
from tests.models import called_parts as parts
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import TOLERANCE, Outcome, is_moving, once, train_module, worst
from tests.rank_pool import RankError

STEPS = 3


def trained(make: Any, strategy: str, num_ranks: int, **kwargs: Any) -> Outcome:
    readers = num_readers(strategy.partition(":")[0], num_ranks)
    with mock.patch.object(layer_stacks, "LARGE_UNIT_NUMEL", 1200):
        return train_module(make, batches("byte_gpt", readers, STEPS), strategy, num_ranks, **kwargs)


NAMES = ("fsdp_custom", "zero2_custom", "fsdp_offload_custom", "hsdp_custom")
MADE = [
    parts.CallsParts,
    parts.MovesItself,
    parts.CallsWholeAndParts,
    parts.CallsAPartOfALayer,
    parts.CallsAfterBackward,
    parts.SamplesFromAPart,
    parts.GradientsInHooks,
    parts.ReadsAWeight,
    parts.Scores,
]


@pytest.mark.parametrize(
    ("make", "strategy"),
    [*((make, name) for make in MADE for name in NAMES), (parts.CallsAMethod, "fsdp_custom")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_parts_are_gathered_around_calls_from_outside(ranks: Any, make: Any, strategy: str) -> None:
    size = 4 if strategy == "hsdp_custom" else 2
    expected = once(trained, make, "auto", 1)
    assert is_moving(expected)
    assert len(expected.losses) == STEPS
    assert worst(ranks(size).run(trained, make, strategy, size)[0], expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("make", "options", "kwargs"),
    [
        (parts.CallsAPartOfALayer, "recompute=full", {}),
        (parts.CallsAPartOfALayer, "check=first_step", {}),
        (parts.MovesItself, "check=first_step", {}),
        (parts.MovesItself, "accumulation_sync=last", {"accumulate_grad_batches": 2}),
        (parts.CallsWholeAndParts, "accumulation_sync=last", {"accumulate_grad_batches": 2}),
        (parts.CallsWholeAndParts, "optimizer_in_backward=true", {"gradient_clip_val": None}),
        (parts.CallsAfterBackward, "check=first_step", {}),
        (parts.CompilesAPart, "reshard=always", {}),
        (parts.CallsAPartOfALayer, "compile=layers", {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_parts_are_gathered_with_policies(ranks: Any, make: Any, options: str, kwargs: Any) -> None:
    expected = once(trained, make, "auto", 1, **kwargs)
    assert worst(ranks(2).run(trained, make, f"fsdp_custom:{options}", 2, **kwargs)[0], expected) <= TOLERANCE


def test_what_is_freed_before_backward_is_told(ranks: Any) -> None:
    """A method of a part reads weights that other calls have gathered: they are freed before its backward."""
    with pytest.raises(RankError, match="forward_methods"):
        ranks(2).run(trained, parts.CallsAMethod, "zero2_custom", 2, deadline=30)
    expected = once(trained, parts.CallsAMethod, "auto", 1)
    given = "zero2_custom:forward_methods=model.decoder.features"
    assert worst(ranks(2).run(trained, parts.CallsAMethod, given, 2)[0], expected) <= TOLERANCE


class CalledAfterBackward(ByteGPT):
    """Calls layers, which are units, and what is around them, between backward and the update."""

    def on_after_backward(self) -> None:
        with torch.no_grad():
            self.sampled = self.model(torch.zeros(1, 4, dtype=torch.long))


def trained_by_layers(strategy: str, num_ranks: int) -> Outcome:
    """The result where what is around the layers belongs to the root."""
    return train_module(CalledAfterBackward, batches("byte_gpt", num_ranks), strategy, num_ranks)


@pytest.mark.parametrize("strategy", ["fsdp_custom", "zero2_custom"])
def test_shards_are_there_behind_a_call_in_a_hook(ranks: Any, strategy: str) -> None:
    """The comparison of the first step finds no gradients otherwise."""
    expected = once(trained_by_layers, "auto", 1)
    assert worst(ranks(2).run(trained_by_layers, f"{strategy}:check=first_step", 2)[0], expected) <= TOLERANCE


class MovedInTheMiddle(ByteGPT):
    """Moves itself to where it is in its step: what is around the layers stays gathered."""

    def loss(self, tokens: Tensor) -> Tensor:
        before = self.model.tokens.weight
        self.to(self.device).float()
        assert self.model.tokens.weight is before
        return super().loss(tokens)


def moved(strategy: str, num_ranks: int) -> Outcome:
    return train_module(MovedInTheMiddle, batches("byte_gpt", num_ranks), strategy, num_ranks)


def test_what_is_gathered_stays_where_it_is(ranks: Any) -> None:
    assert worst(ranks(2).run(moved, "fsdp_custom", 2)[0], once(moved, "auto", 1)) <= TOLERANCE


class GradientInHook(parts.CallsParts):
    """Asks for gradients of parameters by themselves."""

    def on_train_epoch_end(self) -> None:
        with torch.enable_grad():
            torch.autograd.grad(self.model(torch.zeros(1, 4, dtype=torch.long))[1].sum(), list(self.parameters()))


def test_gradients_of_shards_are_in_no_graph(ranks: Any) -> None:
    assert (
        "Call backward and read .grad, or use zero1_custom"
        in ranks(2).run(note_of, GradientInHook, "fsdp_custom", 2)[0]
    )
    assert ranks(2).run(note_of, GradientInHook, "zero1_custom", 2)[0] == ""
