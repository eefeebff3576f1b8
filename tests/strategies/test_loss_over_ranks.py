"""Ranks average the losses of their samples. Where that is not the loss of all of them, the first step says so."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_parallel import build_strategy
from lightning_parallel.callbacks import TokenWeighted
from lightning_parallel.strategies.loss_over_ranks import _words
from tests.data import GLOBAL_BATCH, batches
from tests.jobs.losses import lines
from tests.models.cases import LENGTH, VOCABULARY, ByteGPT, next_token_loss
from tests.models.faults import ComparesSamples, SumOfSamples, UnevenLabels, WithDropout
from tests.names import num_ranks, num_readers
from tests.parity import checked, make_trainer, train_module


class ComparesAllSamples(ByteGPT):
    """As it should be under data parallelism."""

    def loss(self, tokens: Tensor) -> Tensor:
        outputs = F.normalize(self.model(tokens).mean(1), dim=-1)
        outputs = self.all_gather(outputs, sync_grads=True).flatten(0, -2)
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class BalancesNothingYet(ByteGPT):
    """A loss of how evenly samples are dealt out to four heads, which give all samples nearly the same at first."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Linear(16, 4, bias=False)
        nn.init.normal_(self.heads.weight, std=1e-4)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.heads(self.model.tokens(tokens)).flatten(0, 1)
        chosen = F.one_hot(logits.argmax(-1), 4).float().mean(0)
        return super().loss(tokens) + 1e-2 * (chosen * logits.softmax(-1).mean(0)).sum()


class DrawsNoise(ByteGPT):
    """A loss of random numbers is another one on each part of a batch."""

    def loss(self, tokens: Tensor) -> Tensor:
        return (self.model(tokens) - torch.randn(1)).square().mean()


class SumOfDrawn(ByteGPT):
    """A loss of what is drawn for each sample and for the batch, in every way, as that of a variational autoencoder."""

    def drawn(self, tokens: Tensor) -> Tensor:
        """`[samples]`: a loss of each sample."""
        outputs = self.model(tokens)
        means, deviations = outputs.mean(-1), outputs.std(-1)
        noise = torch.distributions.Normal(means, deviations).rsample((3,)).mean(0)
        kept = torch.rand_like(outputs) < 0.5
        times = torch.randint(1, 9, (len(tokens),))
        outputs = outputs * kept + torch.empty_like(outputs).normal_() + torch.randn(VOCABULARY)
        return (outputs.square().mean(-1) + noise.square()).mean(-1) * times

    def loss(self, tokens: Tensor) -> Tensor:
        return self.drawn(tokens).sum()


class MeanOfDrawn(SumOfDrawn):
    def loss(self, tokens: Tensor) -> Tensor:
        return self.drawn(tokens).mean()


class DrawsForEach(SumOfDrawn):
    """A mean over samples, for each of which it draws by itself."""

    def loss(self, tokens: Tensor) -> Tensor:
        return torch.stack([value * (1 + torch.rand(())) for value in self.model(tokens).square().mean((1, 2))]).mean()


class SortsDrawn(SumOfDrawn):
    """A mean over samples that draws for them in another order."""

    def loss(self, tokens: Tensor) -> Tensor:
        values = self.model(tokens).square().mean((1, 2))
        values = values[torch.rand(len(values)).argsort()] + values.sort().values
        return (values * torch.rand(len(values))).mean()


class DrawsAgain(SumOfDrawn):
    """A mean over samples that draws under a checkpoint, which runs again in backward."""

    def loss(self, tokens: Tensor) -> Tensor:
        return checkpoint(
            lambda values: (values * torch.rand_like(values)).mean(), self.model(tokens), use_reentrant=False
        )


class DrawsIndices(SumOfDrawn):
    """Draws samples by their numbers."""

    def loss(self, tokens: Tensor) -> Tensor:
        return self.drawn(tokens)[torch.randint(len(tokens), (len(tokens),))].mean()


class ByHand(ByteGPT):
    """Goes backward by itself, from one loss or several."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def losses(self, tokens: Tensor) -> list[Tensor]:
        return [self.loss(tokens)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        losses = self.losses(batch[0])
        for loss in losses:
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5)
        optimizer.step()
        self.untoggle_optimizer(optimizer)
        return torch.stack(losses).sum().detach()


class CutsByHand(ByHand):
    """Accumulates gradients of two parts of two samples in its step."""

    def losses(self, tokens: Tensor) -> list[Tensor]:
        return [self.loss(part) / 2 for part in tokens.split(2)]


class SumOfShuffled(ByteGPT):
    """In each run, samples meet others: nobody can say."""

    def loss(self, tokens: Tensor) -> Tensor:
        outputs = self.model(tokens).mean((1, 2))
        return (outputs * outputs[torch.randperm(len(outputs))]).sum()


class SumsByHand(SumOfDrawn, ByHand):
    def losses(self, tokens: Tensor) -> list[Tensor]:
        return [self.loss(tokens), 0.5 * self.loss(tokens)]


class MeansByHand(SumsByHand):
    def loss(self, tokens: Tensor) -> Tensor:
        return self.drawn(tokens).mean()


class FailsOnParts(ByteGPT):
    """A step that is written for one size of batches."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * tokens.view(GLOBAL_BATCH // 2, LENGTH).shape[0]


class SumsInTraining(SumOfSamples):
    """Computes no loss in evaluation, as detectors do, and drops values in training."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.ends = Ends()

    def loss(self, tokens: Tensor) -> Tensor:
        return self.ends(super().loss(tokens))


class MeansInTraining(ByteGPT):
    """The same with a mean."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.ends = Ends()

    def loss(self, tokens: Tensor) -> Tensor:
        return self.ends(super().loss(tokens))


class Ends(nn.Module):
    """Gives a value in training, and in evaluation something else than a number."""

    def __init__(self) -> None:
        super().__init__()
        self.drops = nn.Dropout(0.5)

    def forward(self, value: Tensor) -> Tensor:
        return self.drops(value) if self.training else torch.zeros(3, 0)


class NotANumberInEvaluation(SumOfSamples):
    """Divides by the number of what it has kept in training."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * (1.0 if self.training else math.nan)


class FailsInEvaluation(SumOfSamples):
    """Ends in an error there."""

    def loss(self, tokens: Tensor) -> Tensor:
        if not self.training:
            raise NotImplementedError
        return super().loss(tokens)


def told(make: Any, name: str, callbacks: tuple[Callback, ...] = (), **kwargs: Any) -> list[str]:
    size = num_ranks(name)
    loader = batches("byte_gpt", num_readers(name, size), 2)
    with lines() as found:
        train_module(make, loader, checked(name), size, watching=callbacks, **kwargs)
    return found


SUM, OTHER = "the loss is a sum over samples", "is not the mean of the losses of its parts"
GRADIENTS = "the gradient of a batch is not the mean of those of its parts"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (SumOfSamples, SUM),
        (UnevenLabels, OTHER),
        (ComparesSamples, OTHER),
        (BalancesNothingYet, GRADIENTS),
        (SumsInTraining, SUM),
        (FailsInEvaluation, SUM),
        (NotANumberInEvaluation, SUM),
        (SumOfDrawn, SUM),
        (SumsByHand, SUM),
    ],
)
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom", "fsdp_tp_custom"])
def test_other_losses_are_told_once(ranks: Any, make: Any, words: str, name: str) -> None:
    first, *others = ranks(num_ranks(name)).run(told, make, name)
    assert len(first) == 1
    assert words in first[0]
    assert "2 ranks that read different samples" in first[0]
    assert not any(others)


class NormalizesBatches(ByteGPT):
    """Statistics of a batch, in training."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.norm = nn.BatchNorm1d(VOCABULARY)
        self.frozen = nn.BatchNorm1d(VOCABULARY).eval()

    def on_train_epoch_start(self) -> None:
        self.frozen.eval()

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.frozen(self.norm(self.model(tokens).mT)).mT, tokens)


class NormalizesByHand(NormalizesBatches, ByHand):
    """The same under manual optimization."""


@pytest.mark.parametrize("make", [NormalizesBatches, NormalizesByHand])
def test_statistics_of_batches_are_told(ranks: Any, make: Any) -> None:
    first, *others = ranks(2).run(told, make, "ddp_custom")
    assert len(first) == 1
    assert first[0].startswith("norm normalizes with statistics of its batch, which each of the 2 ranks")
    assert not any(others)
    assert not any(ranks(2).run(told, make, "tp_custom"))


@pytest.mark.parametrize(
    "make",
    [
        ByteGPT,
        WithDropout,
        ComparesAllSamples,
        DrawsNoise,
        MeanOfDrawn,
        MeansByHand,
        CutsByHand,
        DrawsForEach,
        SortsDrawn,
        DrawsAgain,
        DrawsIndices,
        SumOfShuffled,
        FailsOnParts,
        MeansInTraining,
    ],
)
def test_nothing_is_told_of_means_and_of_what_cannot_be_seen(ranks: Any, make: Any) -> None:
    assert not any(ranks(2).run(told, make, "ddp_custom"))


def test_nothing_is_told_where_all_ranks_share_the_samples(ranks: Any) -> None:
    assert not any(ranks(2).run(told, SumOfSamples, "tp_custom"))


def test_nothing_is_told_where_a_callback_weights_the_loss(ranks: Any) -> None:
    assert not any(ranks(2).run(told, UnevenLabels, "ddp_custom", (TokenWeighted(),)))


def test_a_window_of_several_microsteps(ranks: Any) -> None:
    assert SUM in ranks(2).run(told, SumOfSamples, "ddp_custom", accumulate_grad_batches=2)[0][0]


def told_of_batches(make: Any, size: int) -> list[str]:
    """What is said of a step on batches of `size` samples."""
    trainer = make_trainer(build_strategy("ddp_custom:check=first_step"), 2, max_steps=1)
    tokens = torch.randint(0, VOCABULARY, (2 * size, LENGTH), generator=torch.Generator().manual_seed(0))
    with lines() as found:
        trainer.fit(make("sgd"), DataLoader(TensorDataset(tokens), batch_size=size))
    return found


@pytest.mark.parametrize("size", [1, 11])
def test_batches_without_parts_are_left_out(ranks: Any, size: int) -> None:
    assert not any(ranks(2).run(told_of_batches, SumOfSamples, size))


@pytest.mark.parametrize("size", [2, 3, 12, 24])
def test_some_samples_of_other_batches(ranks: Any, size: int) -> None:
    assert not any(ranks(2).run(told_of_batches, ByteGPT, size))
    assert SUM in ranks(2).run(told_of_batches, SumOfSamples, size)[0][0]
    assert OTHER in ranks(2).run(told_of_batches, ComparesSamples, size)[0][0]


class CountsSteps(ByteGPT):
    """A module that takes the number of samples it is given in a forward."""

    seen: list[int]

    def loss(self, tokens: Tensor) -> Tensor:
        self.seen.append(len(tokens))
        return super().loss(tokens)


def samples_seen(size: int) -> list[int]:
    """The numbers of samples of each run of a step, until the first update is done."""
    CountsSteps.seen = []
    told_of_batches(CountsSteps, size)
    return CountsSteps.seen


@pytest.mark.parametrize(("size", "looks"), [(8, [2, 2, 2, 2, 4, 2, 2]), (24, [2, 2, 2, 2, 8, 4, 2, 2])])
def test_what_is_looked_at_is_small(ranks: Any, size: int, looks: list[int]) -> None:
    assert ranks(2).run(samples_seen, size)[0] == [size, size, *looks]  # the copy, the module, and then parts


def test_words() -> None:
    assert _words(1.0, [0.9, 1.1], 2, 1e-4) == ""
    assert _words(2.0, [0.9, 1.1], 2, 1e-4).startswith(SUM)
    assert OTHER in _words(1.2, [0.9, 1.1], 2, 1e-4)
    assert _words(math.nan, [0.9, 1.1], 2, 1e-4) == ""
    assert _words(0.0, [0.0, 0.0], 2, 1e-4) == ""
