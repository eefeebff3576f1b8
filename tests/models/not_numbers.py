"""A loss that is no number, and a step without a loss, for the samples of one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.data import GLOBAL_BATCH, STEPS, data_of
from tests.models.cases import next_token_loss
from tests.models.pipelined import Deep

BATCH = 1
"""The batch in which it happens."""


class NoNumber(Deep):
    """The loss of one sample is NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        (tokens,) = batch
        logits, marked = self(tokens), data_of("byte_gpt", STEPS * GLOBAL_BATCH, GLOBAL_BATCH)[GLOBAL_BATCH + 1][0]
        is_marked = torch.tensor([batch_idx == BATCH and torch.equal(sample, marked) for sample in tokens])
        return self.ended(logits * torch.where(is_marked, torch.nan, 1.0)[:, None, None], tokens)

    def ended(self, logits: Tensor, tokens: Tensor) -> Tensor | None:
        """The loss."""
        return next_token_loss(logits, tokens)


class NoLoss(NoNumber):
    """A step that is skipped if its loss is NaN."""

    def ended(self, logits: Tensor, tokens: Tensor) -> Tensor | None:
        return None if logits.isnan().any() else super().ended(logits, tokens)
