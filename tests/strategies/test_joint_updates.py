"""Optimizers that compute with several parameters together, where each rank updates some of them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_parallel import ConfigurationError
from tests.data import batches
from tests.models.tables import MODULES
from tests.parity import TOLERANCE, Outcome, once, train_module, worst


class Sharpness(Optimizer):
    """SAM (Foret et al. 2020), as it is published: a norm over all gradients, and a second closure."""

    def __init__(self, parameters: Any, rho: float = 0.5) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base.param_groups

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.norm(torch.stack([gradient.norm(p=2) for gradient in gradients]), p=2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = self.norm([p.grad for p in own])
        for p in own:
            self.state[p]["old"] = p.data.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / norm))
        self.zero_grad()
        closure()
        for p in own:
            p.data = self.state[p]["old"]
        self.base.step()
        return loss


class ReadSharpness(Sharpness):
    """The same by numbers on the host."""

    def norm(self, gradients: list[Tensor]) -> Tensor:
        return torch.tensor(sum(gradient.square().sum().item() for gradient in gradients)).sqrt()


class Trusting(SGD):
    """LARS (You et al. 2017): a rate for each matrix, which is read on the host."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    trust = p.norm().item() / (p.grad.norm().item() + 1.0)
                    p.add_(p.grad, alpha=-group["lr"] * trust)
        return loss


class Own(SGD):
    """An optimizer that nobody knows."""


class Compiled(SGD):
    """An optimizer whose update is a graph of the compiler, and nothing else."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        update = torch.compile(_updated, fullgraph=True, dynamic=True, backend="eager")
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    update(p.detach().view(-1), p.grad.view(-1), group["lr"])
        return loss


def _updated(parameter: Tensor, gradient: Tensor, rate: float) -> None:
    parameter.sub_(rate * gradient)


MAKERS: dict[str, Any] = {
    "sharpness": Sharpness,
    "read": ReadSharpness,
    "together": lambda parameters: Together(parameters, lr=0.3),
    "trusting": lambda parameters: Trusting(parameters, lr=0.1),
    "compiled": lambda parameters: Compiled(parameters, lr=0.1),
    "own": lambda parameters: Own(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


class Together(SGD):
    """All gradients in one vector, whose norm bounds the update."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            norm = torch.cat([p.grad.flatten() for p in group["params"] if p.grad is not None]).norm()
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-float(group["lr"] / (1 + norm)))
        return loss


def trained(maker: str, strategy: str, num_ranks: int, readers: int) -> Outcome:
    """With gradients clipped, which takes all of them together, and is no part of the update."""
    make = functools.partial(MODULES["byte_gpt"], "sgd")

    def module() -> Any:
        built = make()
        built.configure_optimizers = lambda: MAKERS[maker](built.parameters())
        return built

    return train_module(module, batches("byte_gpt", readers), strategy, num_ranks)


def refusal(maker: str, strategy: str, num_ranks: int, readers: int) -> str:
    try:
        trained(maker, strategy, num_ranks, readers)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("maker", ["sharpness", "read"])
@pytest.mark.parametrize(
    ("strategy", "readers", "words"),
    [("zero1_custom", 2, "under zero1_custom a rank updates some"), ("pp_custom", 1, "give pipeline=1")],
)
def test_joint_updates_are_refused(ranks: Any, maker: str, strategy: str, readers: int, words: str) -> None:
    """They were of the norm of this rank's gradients, without an error."""
    for message in ranks(2).run(refusal, maker, strategy, 2, readers):
        assert "computes with several parameters together" in message
        assert words in message
        assert "test_joint_updates.py" in message


@pytest.mark.parametrize(
    ("maker", "strategy", "readers"),
    [
        ("trusting", "zero1_custom", 2),
        ("trusting", "pp_custom", 1),
        ("own", "zero1_custom", 2),
        ("own", "pp_custom", 1),
        ("compiled", "zero1_custom", 2),
        ("compiled", "pp_custom", 1),
        ("sharpness", "ddp_custom", 2),
        ("sharpness", "fsdp_custom", 2),
        ("sharpness", "tp_custom", 1),
        ("read", "tp_custom", 1),
        ("together", "tp_custom", 1),
        ("trusting", "tp_custom", 1),
        ("own", "tp_custom", 1),
    ],
)
def test_updates_of_single_parameters_and_of_all_of_them_run(
    ranks: Any, maker: str, strategy: str, readers: int
) -> None:
    expected = once(trained, maker, "auto", 1, 1)
    assert worst(ranks(2).run(trained, maker, strategy, 2, readers)[0], expected) < TOLERANCE


@pytest.mark.parametrize("maker", ["sharpness", "together"])
def test_updates_of_all_parameters_run_where_they_are_split_and_sharded(ranks: Any, maker: str) -> None:
    expected = once(trained, maker, "auto", 1, 1)
    assert worst(ranks(4).run(trained, maker, "fsdp_tp_custom", 4, 2)[0], expected) < TOLERANCE
