"""Losses that are a mean over samples, and losses that are not: they differ on microbatches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.data import IGNORED
from tests.models.cases import LENGTH, VOCABULARY, Case, next_token_loss
from tests.models.pipelined import Deep


class Mean(Deep):
    """A mean over samples of equal weight."""


class Perplexity(Deep):
    """Logs what no mean over parts of a batch gives; its loss is one."""

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.log("loss", loss)
        self.log("perplexity", loss.detach().exp(), on_step=True, on_epoch=True)
        return loss


class Sum(Deep):
    """A sum over samples."""

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self(tokens), tokens) * len(tokens)


class Ignored(Deep):
    """Another number of labels that count in each sample."""

    def loss(self, tokens: Tensor) -> Tensor:
        labels = torch.where(tokens % 3 == 0, IGNORED, tokens)
        labels[tokens[:, 0] % 2 == 0, 4:] = IGNORED
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Contrast(Case):
    """Each sample against all others of the batch (InfoNCE); logs in several ways."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.body = Deep().model
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def loss(self, tokens: Tensor) -> Tensor:
        vectors = F.normalize(self.body(tokens).flatten(1), dim=-1)
        scores = vectors @ vectors.roll(1, 0).T / self.temperature
        return F.cross_entropy(scores, torch.arange(len(tokens)))

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = self.loss(*batch)
        self.log("contrast", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", on_step=False, on_epoch=True)
        return {"loss": loss, "size": len(batch[0])}


class Labelled(Deep):
    """Labels come with the batch."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class OtherLabel(Labelled):
    """Leaves out a label of its own."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), ignore_index=-1)


def second_half(num_samples: int) -> TensorDataset:
    """Labels of which -1 do not count, in the second half of each batch of 8, as many in two parts of it."""
    tokens, labels = late(num_samples).tensors
    labels = labels.clamp(min=0)
    for sample in range(num_samples):
        if sample % 8 >= 4:
            labels[sample, 9 - sample % 2 :] = -1
    return TensorDataset(tokens, labels)


def later(num_samples: int) -> TensorDataset:
    """Labels of which -1 do not count, from the third batch on."""
    tokens, labels = late(num_samples).tensors
    return TensorDataset(tokens, labels.masked_fill(labels == IGNORED, -1))


class OwnMean(Deep):
    """Divides by a mean of squares that a mask of floats leaves in."""

    def loss(self, tokens: Tensor, mask: Tensor) -> Tensor:
        losses = F.cross_entropy(self(tokens).transpose(1, 2), tokens.roll(-1, 1), reduction="none")
        return (losses * mask).sum() / mask.sum()


def masked_later(num_samples: int) -> TensorDataset:
    """Masks that are ones at first."""
    tokens, _ = late(num_samples).tensors
    mask = torch.ones(tokens.shape)
    mask[num_samples // 2 :: 4, 3:] = 0
    return TensorDataset(tokens, mask)


class RunningMean:
    """State in an object that torch knows nothing of."""

    def __init__(self) -> None:
        self.value = 1.0

    def __call__(self, value: float) -> float:
        self.value = 0.5 * self.value + 0.5 * value
        return self.value


class Tracked(Deep):
    """A sum, divided by a running mean of the hidden states, into which it has written."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.running = RunningMean()

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens) + self.model.positions.weight
        for block in self.model.blocks:
            hidden = block(hidden)
        hidden += 0.5
        logits = self.model.head(self.model.norm(hidden))
        return next_token_loss(logits, tokens) * len(tokens) / self.running(float(hidden.detach().pow(2).mean()))


class Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        self.count += 1
        return self.count


class Counting(Deep):
    """A sum, weighted by the number of the step, which an object counts before the stack."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.counter = Counter()

    def loss(self, tokens: Tensor) -> Tensor:
        weight = 0.2 * self.counter()
        return weight * next_token_loss(self(tokens), tokens) * len(tokens)


class OwnGenerator(Deep):
    """Adds a number of its own generator to the tokens."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.generator = np.random.default_rng(0)

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = (tokens + int(self.generator.integers(1, VOCABULARY))) % VOCABULARY
        return next_token_loss(self(tokens), tokens)


class Entropy(Deep):
    """A sum that is defined for hidden states between zero and one only."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(map(Bounded, self.model.blocks))

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens) + self.model.positions.weight
        for block in self.model.blocks:
            hidden = block(hidden)
        wanted = F.one_hot(tokens % hidden.shape[-1], hidden.shape[-1]).float()
        return F.binary_cross_entropy(hidden, wanted, reduction="sum") / 100


class Bounded(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sigmoid(self.block(hidden))


def late(num_samples: int) -> TensorDataset:
    """Tokens and labels, of which all count at first; later some do not, in every fourth sample."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[num_samples // 2 :: 4, 3:] = IGNORED
    return TensorDataset(tokens, labels)


def even(num_samples: int) -> TensorDataset:
    """Tokens and labels, of which some do not count in samples that the first of two ranks reads."""
    tokens, labels = late(num_samples).tensors
    labels[::2, 3:] = IGNORED
    return TensorDataset(tokens, labels)


class Masked(Deep):
    """Predicts tokens that it has masked by itself."""

    def loss(self, tokens: Tensor) -> Tensor:
        is_masked = torch.rand(tokens.shape) < 0.3
        labels = torch.where(is_masked, tokens, IGNORED)
        return F.cross_entropy(self(tokens.masked_fill(is_masked, 0)).flatten(0, 1), labels.flatten())


class OnlyWithGradients(Labelled):
    """Cannot be computed without gradients where a label is ignored."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self(tokens)
        if not torch.is_grad_enabled() and (labels == IGNORED).any():
            raise ValueError("no loss without gradients")
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class SometimesMasked(Masked):
    """Draws random numbers for some batches only."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if (labels == IGNORED).any():
            return super().loss(tokens)
        return next_token_loss(self(tokens), tokens)


OTHERS: dict[str, Any] = {
    "late": (Labelled, late),
    "perplexity": (Perplexity, None),
    "other label": (OtherLabel, second_half),
    "other label, later": (OtherLabel, later),
    "own mean": (OwnMean, masked_later),
    "tracked": (Tracked, None),
    "counting": (Counting, None),
    "entropy": (Entropy, None),
    "masked": (Masked, None),
    "own generator": (OwnGenerator, None),
    "only with gradients": (OnlyWithGradients, even),
    "sometimes masked": (SometimesMasked, even),
}
"""Modules, and their data, where it is not the usual tokens."""
LOSSES: dict[str, type[Case]] = {"mean": Mean, "sum": Sum, "ignored": Ignored, "contrast": Contrast}
