"""Steps that give their stack other rows than the batch has: views of samples, another order, fewer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.cases import next_token_loss
from tests.models.pipelined import DeepTied


class Rows(DeepTied):
    """Keeps the rows that its steps return."""

    def __init__(self) -> None:
        super().__init__("sgd")
        self.returned: list[Tensor] = []

    def rows(self, tokens: Tensor) -> Tensor:
        """What the stack is given for a batch, `[rows, length]`."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self.rows(batch[0])
        logits = self(rows)
        return {"loss": next_token_loss(logits, rows), "means": logits.mean((1, 2)).detach()}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        rows = self.rows(batch[0])
        self.log("val_loss", next_token_loss(self(rows), rows), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs["means"])


def contrast(rows: Tensor) -> Tensor:
    """The loss of SimCLR, with the two views of a sample half of the rows apart; `[]`."""
    rows = F.normalize(rows, dim=-1)
    half = len(rows) // 2
    others = rows @ rows.t() / 0.5 - 1e4 * torch.eye(len(rows), device=rows.device)
    return F.cross_entropy(others, torch.arange(2 * half, device=rows.device).roll(half))


class TwoViews(Rows):
    """The first views of all samples, then the second ones, as in SimCLR."""

    def rows(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens, tokens.flip(1)])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", contrast(self(self.rows(batch[0])).mean(1)), sync_dist=True)


class Contrast(TwoViews):
    """With a loss that compares samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = self(self.rows(batch[0])).mean(1)
        return {"loss": contrast(rows), "means": rows.mean(1).detach()}


class ThreeViews(Rows):
    """Three views, one behind the other."""

    def rows(self, tokens: Tensor) -> Tensor:
        return torch.cat([tokens, tokens.flip(1), tokens.roll(1, 1)])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        first, second, _ = self(self.rows(batch[0])).mean(1).chunk(3)
        self.log("val_loss", contrast(torch.cat([first, second])), sync_dist=True)


class Beside(TwoViews):
    """The views of each sample beside each other."""

    def rows(self, tokens: Tensor) -> Tensor:
        return torch.stack([tokens, tokens.flip(1)], 1).flatten(0, 1)


class Reversed(Rows):
    """The samples from the last one on."""

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens.flip(0)


class Sorted(Rows):
    """The samples by their first token."""

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens[tokens[:, 0].argsort()]


class Some(Rows):
    """Only some samples, as it happens."""

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens[tokens[:, 0] > 8]


class LateViews(Rows):
    """A second view from the second epoch on."""

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens if self.current_epoch == 0 else torch.cat([tokens, tokens.flip(1)])


class LateSorted(Rows):
    """The samples in their order at first."""

    def rows(self, tokens: Tensor) -> Tensor:
        return tokens if self.global_step < 2 else tokens[tokens[:, 0].argsort()]


class OfLoaders(TwoViews):
    """Two views in the second loader alone."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:  # type: ignore[override]
        rows = torch.cat([batch[0], batch[0].flip(1)]) if dataloader_idx else batch[0]
        self.log(f"val_loss_{dataloader_idx}", contrast(self(rows).mean(1)), add_dataloader_idx=False)
