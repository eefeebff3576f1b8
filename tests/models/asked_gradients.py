"""Steps that ask for gradients by `torch.autograd.grad`: to weight losses by them, or to train by them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.cases import next_token_loss
from tests.models.user_code import Tokens


class Weighted(Tokens):
    """As VQGAN weights its losses by the norms of their gradients at the last layer."""

    def last(self) -> Tensor:
        return self.model.norm.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        losses = next_token_loss(logits, batch[0]), logits.pow(2).mean()
        norms = [torch.autograd.grad(each, self.last(), retain_graph=True)[0].norm() for each in losses]
        return losses[0] + (norms[0] / (norms[1] + 1e-4)).clamp(0, 1e4).detach() * losses[1]


class WeightedInside(Weighted):
    """At a parameter of a layer of the stack."""

    def last(self) -> Tensor:
        return next(self.model.blocks[-1].parameters())


class OfEmbeddings(Tokens):
    """A penalty on the gradient at the embeddings, as of a saliency map."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        found: list[Tensor] = []
        hook = self.model.tokens.register_forward_hook(lambda module, args, result: found.append(result))
        loss = next_token_loss(self.model(batch[0]), batch[0])
        hook.remove()
        (gradient,) = torch.autograd.grad(loss, found[:1], retain_graph=True)
        return loss * (1 + gradient.norm())


class Assigned(Tokens):
    """Trains by gradients that nobody has averaged over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def parameters_of_step(self) -> list[Tensor]:
        return list(self.parameters())

    def averaged(self, gradient: Tensor) -> Tensor:
        return gradient

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = next_token_loss(self.model(batch[0]), batch[0])
        parameters = self.parameters_of_step()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = self.averaged(gradient)
        optimizer.step()
        return loss.detach()


class Averaged(Assigned):
    """As the message says."""

    def averaged(self, gradient: Tensor) -> Tensor:
        gathered: Any = self.all_gather(gradient)
        return gathered.mean(0) if gathered.ndim > gradient.ndim else gathered  # type: ignore[no-any-return]


class TwoUntoggled(Tokens):
    """Two optimizers, each of which steps while gradients of the other's parameters wait for its own turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        inner = list(self.model.blocks.parameters())
        outer = [p for p in self.parameters() if all(p is not each for each in inner)]
        return torch.optim.SGD(inner, lr=0.1), torch.optim.SGD(outer, lr=0.1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for index, optimizer in enumerate(optimizers):
            loss = next_token_loss(self.model(batch[0]), batch[0]) * (1 + index)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()
