"""What a step writes into parameters of which every rank has a copy: alike on all of them, or refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from lightning_parallel import ConfigurationError
from lightning_parallel.ranks.fingerprints import differing
from lightning_parallel.techniques import replica_writes
from tests.data import batches
from tests.models.cases import VOCABULARY, ByteGPT
from tests.parity import TOLERANCE, once, train_module, worst

NAMES = ("ddp_custom", "zero1_custom")


class Shortened(ByteGPT):
    """Rows of the table that a step uses are shortened in place."""

    def __init__(self) -> None:
        super().__init__()
        self.model.tokens = nn.Embedding(VOCABULARY, 16, max_norm=0.5)


class MeanOfSamples(ByteGPT):
    """A running mean, kept in a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean.lerp_(self.model.tokens(batch[0]).detach().mean((0, 1)), 0.5)
        return super().training_step(batch, batch_idx)


class Clipped(ByteGPT):
    """Every rank clips its weights in the same way."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
        return super().training_step(batch, batch_idx)


class OnOneRank(ByteGPT):
    """Rank 0 alone writes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            with torch.no_grad():
                self.model.norm.bias.add_(1)
        return super().training_step(batch, batch_idx)


class DrawnInStep(ByteGPT):
    """First values of a parameter are drawn in the first step, and written where torch does not count it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_drawn = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.is_drawn:
            self.is_drawn = True
            self.model.norm.bias.data.add_(torch.randn_like(self.model.norm.bias), alpha=1e-3)
        return super().training_step(batch, batch_idx)


def fit(make: Any, strategy: str, num_ranks: int) -> Any:
    return train_module(make, batches("byte_gpt", num_ranks), strategy, num_ranks)


def refused(make: Any, strategy: str) -> str:
    """The refusal, on this rank."""
    with pytest.raises(ConfigurationError) as caught:
        fit(make, strategy, 2)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_shortened_rows_are_refused(ranks: Any, name: str) -> None:
    for words in ranks(2).run(refused, Shortened, name):
        assert "the step writes into model.tokens.weight, on each rank what its own samples give" in words
        assert "max_norm of nn.Embedding does so" in words


def test_means_of_samples_are_refused(ranks: Any) -> None:
    words = ranks(2).run(refused, MeanOfSamples, "ddp_custom")[1]
    assert "the step writes into mean, on each rank" in words
    assert "Keep it in a buffer" in words


@pytest.mark.parametrize("name", NAMES)
def test_values_that_each_rank_draws_are_refused(ranks: Any, name: str) -> None:
    for words in ranks(2).run(refused, DrawnInStep, name):
        assert "the step writes into model.norm.bias, on each rank" in words
        assert "draw first values in setup()" in words


def test_a_write_of_one_rank_is_refused_on_all(ranks: Any) -> None:
    for words in ranks(2).run(refused, OnOneRank, "ddp_custom"):
        assert "the step writes into model.norm.bias" in words


@pytest.mark.parametrize("name", NAMES)
def test_what_all_ranks_write_alike_is_right(ranks: Any, name: str) -> None:
    assert worst(ranks(2).run(fit, Clipped, name, 2)[0], once(fit, Clipped, "auto", 1)) < TOLERANCE


@pytest.mark.parametrize("make", [Shortened, MeanOfSamples])
def test_one_rank_writes_what_it_likes(make: Any) -> None:
    assert worst(fit(make, "ddp_custom", 1), once(fit, make, "auto", 1)) < TOLERANCE


class ShortenedByHand(Shortened):
    """The same under manual optimization, which writes into all parameters when it updates them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(*batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def compared(make: Any) -> tuple[str, int]:
    """The refusal, and how many parameters were compared before it."""
    numbers: list[int] = []

    def spy(found: Any) -> Any:
        numbers.append(len(found))
        return differing(found)

    with mock.patch.object(replica_writes, "differing", spy):
        return refused(make, "ddp_custom"), sum(numbers)


def test_updates_within_a_step_are_not_compared(ranks: Any) -> None:
    for words, number in ranks(2).run(compared, ShortenedByHand):
        assert "the step writes into model.tokens.weight, on each rank" in words
        assert number == 1
