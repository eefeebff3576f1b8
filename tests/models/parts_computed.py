"""What people compute with parameters and gradients outside of layers: penalties in steps, surgery in hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from tests.models.cases import next_token_loss
from tests.models.habits import Habit


class Penalties(Habit):
    """Of all kinds, also over what no layer uses."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[0].spare = nn.Linear(4, 4)

    def penalty(self) -> Any:
        weights = [block.mlp[0].weight for block in self.model.blocks]
        found: Any = 1e-3 * sum(parameter.abs().sum() for parameter in self.parameters())
        found += 1e-3 * sum(parameter.norm() for name, parameter in self.named_parameters() if "bias" not in name)
        found += 1e-2 * sum((weight.T @ weight - torch.eye(weight.shape[1])).norm() for weight in weights)
        found += 1e-3 * sum(torch.sqrt((weight**2).sum(dim=1) + 1e-8).sum() for weight in weights)
        return found + 1e-2 * parameters_to_vector(self.parameters()).norm()

    def loss(self, tokens: Tensor) -> Any:
        return next_token_loss(self.model(tokens), tokens) + self.penalty()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.log("penalty", self.penalty())
        return self.loss(batch[0])

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.callback_metrics["penalty"]))


class PenaltyOfSamples(Habit):
    """A penalty that each rank weights by its own samples, and a product with the weight of another layer."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        weight = self.model.blocks[0].mlp[0].weight
        logits = self.model(batch[0])
        further = F.linear(logits[..., : weight.shape[1]], weight).pow(2).mean()
        weights: Any = sum(parameter.pow(2).sum() for parameter in self.model.blocks.parameters())
        return next_token_loss(logits, batch[0]) + 0.1 * further + 1e-3 * weights * logits.pow(2).mean()


class ElasticWeights(Habit):
    """Held near the values of the start, which are kept as plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.start = {name: value.detach().clone() for name, value in self.named_parameters()}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        away: Any = sum((value - self.start[name]).pow(2).sum() for name, value in self.named_parameters())
        return super().training_step(batch, batch_idx) + away


class SharpnessAware(Habit):
    """Perturbs weights along the gradient, and takes the gradient there (Foret et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        with torch.no_grad():
            parameters = [parameter for parameter in self.parameters() if parameter.grad is not None]
            norm = torch.norm(torch.stack([parameter.grad.norm() for parameter in parameters]))
            steps = [parameter.grad * (0.05 / (norm + 1e-12)) for parameter in parameters]
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.add_(step)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter, step in zip(parameters, steps, strict=True):
                parameter.sub_(step)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class Surgery(Habit):
    """A hook of a subclass operates on the matrices of layers, before each update."""

    @torch.no_grad()
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, value in self.matrices():
            self.operate(name, value)

    def matrices(self) -> Iterator[tuple[str, Any]]:
        """Of the layers."""
        return ((name, value) for name, value in self.model.blocks.named_parameters() if value.ndim == 2)

    def operate(self, name: str, value: Any) -> None:
        raise NotImplementedError


def mask_of(name: str, value: Tensor) -> Tensor:
    return (torch.rand(value.shape, generator=torch.Generator().manual_seed(len(name))) > 0.3).float()


class MaskedGradients(Surgery):
    def operate(self, name: str, value: Any) -> None:
        mask = mask_of(name, value)
        value.grad.mul_(mask)
        value.grad = value.grad + 0.01 * mask
        value.grad[value.grad.abs() < 1e-3] = 0
        chosen = value.grad.abs().flatten().topk(value.numel() // 2).indices
        kept = torch.zeros(value.numel())
        kept[chosen] = 1
        value.grad.mul_(kept.view(value.shape))


class Rows(Surgery):
    """Writes into views, which torch makes copies of where it has to gather first."""

    def operate(self, name: str, value: Any) -> None:
        value.grad[0].zero_()
        value[:3].mul_(0.9)
        value[-2:].add_(0.01)
        value[:, 0].fill_(0.1)
        value.narrow(0, 1, 2).mul_(0.9)
        value.select(0, 1).add_(0.01)
        value.t()[1].mul_(0.9)
        value.flatten()[3:5].fill_(0.05)
        value.view(-1).mul_(1.01)
        value.data[1].clamp_(-0.1, 0.1)
        value.data[:2].copy_(torch.full((2, value.shape[1]), 0.02))
        value.diagonal().add_(0.01)


class MoreRows(Surgery):
    """Further ways to views, and writes by index."""

    def operate(self, name: str, value: Any) -> None:
        value.chunk(2)[0].mul_(0.9)
        value.split(3)[1].mul_(0.9)
        value.unbind(0)[1].mul_(0.9)
        for place, row in enumerate(value):
            if place < 2:
                row.add_(0.01)
        value[1:3, :2] += 0.01
        value[0] = 0.03
        value[value < -0.2] = -0.2
        value.index_fill_(0, torch.tensor([2]), 0.04)
        value.index_copy_(0, torch.tensor([3]), torch.full((1, value.shape[1]), 0.05))
        value.masked_fill_(mask_of(name, value) == 0, 0.01)
        torch.add(value, 0.001, out=value)


class Entries(Surgery):
    """Writes into single elements, which are views without a dimension."""

    def matrices(self) -> Iterator[tuple[str, Any]]:
        return ((name, value) for name, value in self.model.blocks.named_parameters() if value.ndim == 1)

    def operate(self, name: str, value: Any) -> None:
        value.grad[0].mul_(0.1)
        value[1].add_(0.02)
        value.select(0, 2).mul_(0.5)
        value[-1] = value[0] + value[1]
        self.seen.append(float(value[-1]))


class Averages(Surgery):
    """Averages and distances, kept in plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = {name: torch.zeros(value.shape) for name, value in self.matrices()}

    def operate(self, name: str, value: Any) -> None:
        self.mean[name] += (value.detach() - self.mean[name]) / 3
        self.mean[name].mul_(0.9).add_(value, alpha=0.1)
        value.copy_(0.9 * value + 0.1 * self.mean[name])
        self.seen.append(float(F.cosine_similarity(value.flatten(), self.mean[name].flatten(), dim=0)))
        self.seen.append(float(torch.linalg.matrix_norm(value, 2)))
        self.seen.append(float(torch.linalg.svdvals(value)[0]))
        self.seen.append(float(value.flatten().kthvalue(5).values))
        self.seen.append(float((value @ torch.ones(value.shape[1])).norm()))


class PenaltyOfRankZero(Habit):
    """A term of the loss that only rank 0 computes, once, in the third step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero and batch_idx == 2:
            loss = loss + self.term(self.model.blocks[1].mlp[0].weight)
        return loss

    def term(self, weight: Tensor) -> Tensor:
        return weight.norm()


class LookOfRankZero(PenaltyOfRankZero):
    """For the term, ranks meet before it is a single value."""

    def term(self, weight: Tensor) -> Tensor:
        return weight.softmax(0).softmax(1).mean()
