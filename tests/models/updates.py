"""What people do around backward and update with hooks of Lightning's, on one device."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tests.models.cases import VOCABULARY
from tests.models.user_code import Tokens


class UpdatesSeldom(Tokens):
    """An update in each second step; the closure runs in each, and clears the gradients of the one before."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 1:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        else:
            optimizer_closure()


class ClearsSeldom(Tokens):
    """Gradients that stay for the next update, too."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class ClearsToZeros(UpdatesSeldom):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class DoublesGradients(Tokens):
    """A backward of its own."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward(*args, **kwargs)


class DividesByFrequency(Tokens):
    def __init__(self) -> None:
        super().__init__()
        self.model.tokens = nn.Embedding(VOCABULARY, 16, scale_grad_by_freq=True)
