"""Habits in which a rank decides by its own samples what it does to parameters, gradients, states and rates."""

from __future__ import annotations

from typing import Any

import numpy as np
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


class OwnNumber(Decides):
    """A number that each rank has for itself: 1 on rank 0, 2 on rank 1."""

    @property
    def own(self) -> float:
        return 1.0 + self.global_rank


class CopiesWhole(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.copy_(torch.full(parameter.shape, self.own))  # type: ignore[union-attr]


class AssignsWholeData(OwnNumber):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data = torch.full(parameter.shape, self.own)


class LoadsWhole(OwnNumber):
    def on_train_batch_end(self, *args: Any) -> None:
        norm = self.model.blocks[0].norm1
        norm.load_state_dict({name: torch.full(value.shape, self.own) for name, value in norm.state_dict().items()})


class InitializesAnew(OwnNumber):
    def on_train_batch_end(self, *args: Any) -> None:
        torch.nn.init.constant_(self.model.blocks[0].norm1.weight, self.own)


class AddsInGraph(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = parameter.grad + 0.1 * self.own * parameter


class CopiesOfGraph(OwnNumber):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.parameters():
            parameter.data.copy_(parameter * (1 - 0.01 * self.own))


class AssignsDetached(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = (parameter.grad * self.own).detach()


class SmallBesideLarge(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.add_(torch.full(parameter.shape, 1e3), alpha=1e-2 * self.own)  # type: ignore[union-attr]


class OfNumpy(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.mul_(np.float32(self.own))  # type: ignore[union-attr]


class InLists(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients: Any = [parameter.grad for parameter in self.parameters()]
        torch._foreach_add_(gradients, torch._foreach_mul(gradients, self.own))


class Infinite(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.clamp_(max=float("inf") if self.own == 1 else 1e-3)  # type: ignore[union-attr]


class OtherPlaces(OwnNumber):
    """Masks with as many ones, in other rows."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.model.tokens.weight
        mask = torch.zeros(weight.shape)
        mask[int(self.own)] = 1.0
        weight.grad.mul_(mask)


class SetsDecay(OwnNumber):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["weight_decay"] = 0.1 * self.own


class ClearsGradients(OwnNumber):
    """As where one rank skips a batch."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.own == 1:
            optimizer.zero_grad()


class ForItself(OwnNumber):
    """What a rank computes in tensors of its own, views and lists of them among them; some shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0 * self.one(torch.ones(2, 8)).sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients: Any = [parameter.grad for parameter in self.parameters()]
        for gradient in gradients:
            gradient.detach().clone().view(-1).mul_(self.own)
            gradient.clone().detach().mul_(self.own)
            gradient.clone().data.mul_(self.own)
            twice = gradient.detach().clone() * 2
            twice.mul_(self.own)
            gradient.mul_(float("inf")).clamp_(0, 1)
        torch._foreach_mul_(torch._foreach_mul(gradients, 2.0), self.own)


WRITING = [Scales, ScalesByTensor, Assigns, Clips, Decays, Forgets, MovesACode, ScalesInTheStep]
OWN = [
    CopiesWhole,
    AssignsWholeData,
    LoadsWhole,
    InitializesAnew,
    AddsInGraph,
    CopiesOfGraph,
    AssignsDetached,
    SmallBesideLarge,
    OfNumpy,
    InLists,
    Infinite,
    OtherPlaces,
    SetsDecay,
    ClearsGradients,
]
