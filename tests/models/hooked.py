"""Modules whose parameters have hooks of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.cases import VOCABULARY, next_token_loss
from tests.models.user_code import Tokens


class MasksRows(Tokens):
    """As where only new words of an embedding are trained."""

    def __init__(self) -> None:
        super().__init__()
        mask = (torch.arange(VOCABULARY) % 2).float()[:, None]
        self.model.tokens.weight.register_hook(lambda gradient: gradient * mask)


class ScalesAtStart(Tokens):
    def on_fit_start(self) -> None:
        for parameter in self.model.head.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)


class HalvesSums(Tokens):
    """A hook behind the sum: with accumulation, it halves what earlier microsteps have given again."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)


class ScalesByHand(ScalesAtStart):
    """Under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = next_token_loss(self.model(batch[0]), batch[0])
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class Clamps(Tokens):
    """What is clamped on each rank has another mean."""

    def on_fit_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class HookFailsAgain(Tokens):
    """A hook that runs once: again, on a copy, it raises."""

    def on_fit_start(self) -> None:
        factors = [0.5]
        parameter = self.model.head.weight
        handle = parameter.register_hook(lambda gradient: (gradient * factors.pop(), handle.remove())[0])
