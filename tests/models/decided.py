"""Habits in which a rank decides by its own samples what it does to parameters, gradients, states and rates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.cases import next_token_loss, optimizer_of
from tests.models.user_code import Tokens


class Decides(Tokens):
    """Knows the loss of this rank's samples in its hooks."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of("adamw", self.parameters())


class Scales(Decides):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(self.last / 3)  # type: ignore[union-attr]


class ScalesByTensor(Decides):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.data.mul_(torch.tensor(self.last / 3))  # type: ignore[union-attr]


class Assigns(Decides):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad * self.last + 0.01 * parameter.detach()


class Clips(Decides):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1 * self.last)


class Decays(Decides):
    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 - 0.01 * self.last)


class Forgets(Decides):
    def on_train_batch_end(self, *args: Any) -> None:
        for state in self.trainer.optimizers[0].state.values():
            state["exp_avg"].mul_(0.1 * self.last)


class MovesACode(Decides):
    """A code that is seldom used begins anew with what the samples give."""

    def on_train_batch_end(self, outputs: Any, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 1:
            self.model.tokens.weight.data[3] = batch[0].float().mean(0).repeat(2)[: self.model.tokens.weight.shape[1]]


class FollowsLoss(Decides):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * self.last


class SkipsUpdates(Decides):
    """Every other rank leaves out its fifth update, which no look finds before the end."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 4 and self.global_rank % 2 == 1:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class ScalesInTheStep(Decides):
    """Under manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = next_token_loss(self.model(batch[0]), batch[0])
        self.manual_backward(loss)
        for parameter in self.parameters():
            parameter.grad.mul_(loss.item() / 3)  # type: ignore[union-attr]
        optimizer.step()


class OfAllRanks(Decides):
    """The same number on all ranks, written in every way; what rank 0 computes for itself is nobody's business."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        mean = float(self.all_gather(torch.tensor(self.last)).mean())
        optimizer.param_groups[0]["lr"] = 1e-3 * mean
        for parameter in self.parameters():
            parameter.grad.mul_(mean / 3)  # type: ignore[union-attr]
            parameter.grad = parameter.grad * mean
        if self.global_rank == 0:
            for parameter in self.parameters():
                parameter.detach().clone().mul_(self.last)

    def on_train_batch_end(self, *args: Any) -> None:
        for number, parameter in enumerate(self.parameters()):  # stages have other ones
            parameter.data.mul_(1 - 1e-3 * number)


class ClipsByAll(Decides):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        mean = float(self.all_gather(torch.tensor(self.last)).mean())
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1 * mean)
        if self.global_rank == 0:
            torch._foreach_mul_([parameter.detach().clone() for parameter in self.parameters()], self.last)


WRITING = [Scales, ScalesByTensor, Assigns, Clips, Decays, Forgets, MovesACode, ScalesInTheStep]
