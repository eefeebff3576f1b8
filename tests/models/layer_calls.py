"""Modules whose steps call other layers on some ranks, or none at all, on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import next_token_loss
from tests.models.user_code import Tokens


class DropsALayer(Tokens):
    """Leaves one layer out in each step, another one on each rank, as by chance."""

    first_step = 0
    left_out = (1, 2)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        left_out = {self.left_out[self.global_rank]} if self.global_step >= self.first_step else set()
        return next_token_loss(self.logits(batch[0], left_out), batch[0])

    def logits(self, tokens: Tensor, left_out: set[int]) -> Tensor:
        states = self.model.tokens(tokens) + self.model.positions(torch.arange(tokens.shape[1]))
        for index, block in enumerate(self.model.blocks):
            if index not in left_out:
                states = block(states)
        return self.model.head(self.model.norm(states))  # type: ignore[no-any-return]


class DropsALayerLater(DropsALayer):
    first_step = 1


class DropsTheFirstLayer(DropsALayer):
    left_out = (0, 1)


class DropsALayerOnOneRank(DropsALayer):
    """Calls fewer layers than the other rank, which then waits for it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        left_out = {1} if self.global_step == 1 and self.global_rank == 1 else set()
        return next_token_loss(self.logits(batch[0], left_out), batch[0])


class DropsTheLastOnOneRank(DropsALayer):
    """The same of the last layer, in the first step, as experts do that get no token."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(self.logits(batch[0], {2} if self.global_rank == 1 else set()), batch[0])


class NothingToValidate(Tokens):
    """A validation step that does nothing in the sanity check, and a test step that never calls a layer."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.log("loss", next_token_loss(self.model(batch[0]), batch[0]), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("tokens", float(batch[0].numel()))


class TiedByFunction(Tokens):
    """The embedding's weights are those of the head, by a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head = nn.Identity()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return next_token_loss(F.linear(self.model(batch[0]), self.model.tokens.weight), batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing."""


class PenalizedFeatures(Tokens):
    """Forward hooks keep what layers return, for a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[int, Tensor] = {}
        for index in (0, 2):
            self.model.blocks[index].register_forward_hook(
                lambda module, args, output, index=index: self.features.__setitem__(index, output)
            )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * (self.features[0] - self.features[2]).pow(2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Fill the features before the copy is."""
        self.model(batch[0])
