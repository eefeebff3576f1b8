"""Losses that are a mean over samples, and losses that are not: they differ on microbatches."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.data import IGNORED
from tests.models.cases import LENGTH, VOCABULARY, Case, next_token_loss
from tests.models.pipelined import Deep


class Mean(Deep):
    """A mean over samples of equal weight."""


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


def late(num_samples: int) -> TensorDataset:
    """Tokens and labels, of which all count at first; later some do not, in every fourth sample."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[num_samples // 2 :: 4, 3:] = IGNORED
    return TensorDataset(tokens, labels)


class Masked(Deep):
    """Predicts tokens that it has masked by itself."""

    def loss(self, tokens: Tensor) -> Tensor:
        is_masked = torch.rand(tokens.shape) < 0.3
        labels = torch.where(is_masked, tokens, IGNORED)
        return F.cross_entropy(self(tokens.masked_fill(is_masked, 0)).flatten(0, 1), labels.flatten())


LOSSES: dict[str, type[Case]] = {"mean": Mean, "sum": Sum, "ignored": Ignored, "contrast": Contrast}
