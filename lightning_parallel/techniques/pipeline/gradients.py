"""Gradients of a step whose backward has already run, and gradients of parameters that several stages hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.stage_owners import StageOwners, stage_owners_of


class GradientsOfStep:
    """Gradients from backwards inside this context, kept apart from earlier ones.

    Args:
        parameters: The parameters whose gradients are kept.

    Example:
        >>> with GradientsOfStep(parameters) as gradients:
        ...     ...  # forward and backward of all microbatches
        >>> loss = gradients.attached_to(loss, scale=1.0)
        >>> loss.backward()  # adds them to those of before
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._before: list[Tensor | None] = []
        self._new: list[Tensor | None] = []

    def __enter__(self) -> GradientsOfStep:
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def __exit__(self, *_: object) -> None:
        self._new = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._before, strict=True):
            parameter.grad = gradient
        self._before = []

    def attached_to(self, loss: Tensor, *, scale: float) -> Tensor:
        """Give `loss` a backward that adds the new gradients to those of before.

        Lightning clears old gradients between the step and backward, divides the loss by the microsteps of a window,
        and scales it; a user's hooks may do more. All of this reaches the new gradients through the chain rule.

        Args:
            loss: A scalar.
            scale: The new gradients are those of `loss` times this.

        Returns:
            A scalar of the same value.
        """

        @torch.no_grad()
        def deposit(factor: Tensor) -> None:
            change = factor / scale
            is_one = change.device.type == "cpu" and float(change) == 1.0  # asking a GPU costs more than multiplying
            for parameter, gradient in zip(self._parameters, self._new, strict=True):
                if gradient is not None and parameter.requires_grad:  # a hook may have frozen it since
                    new = gradient if is_one else gradient.mul_(change.to(gradient.dtype))
                    parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)

        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        result: Tensor = _Deposit.apply(anchor, loss, deposit)
        return result


class GradientsOfSharers:
    """Gradients of parameters that several layers share, added up over their stages behind each backward of a step.

    Args:
        parameters: The parameters of all layers, each once, in the same order on every rank.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if (h := stage_owners_of(p)) is not None and len(h.ranks) > 1]
        self._before: list[Tensor | None] = []

    def set_aside(self) -> None:
        """Set gradients aside that have been added up already, before a backward."""
        self._before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def join(self) -> None:
        """Add up the gradients of a backward, behind it, and those set aside. A collective of the pipeline."""
        sum_shared_gradients(self._parameters)
        for parameter, before in zip(self._parameters, self._before, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else before.add_(parameter.grad)
        self._before = []


class _Deposit(torch.autograd.Function):
    """Identity forward; backward adds gradients that were computed before, times the incoming gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, deposit: Callable[[Tensor], None]) -> Tensor:
        ctx.deposit = deposit
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.deposit(gradients[0])
        return None, None, None


@torch.no_grad()
def sum_shared_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Give each stage that holds a parameter the sum of the gradients of all that do. A collective of the pipeline.

    Args:
        parameters: All parameters of the module, each once, in the same order on every rank.
    """
    # All stages take part in agreeing on what was used; gradients then only travel between the ranks that hold them.
    shared = [(p, h) for p in parameters if (h := stage_owners_of(p)) is not None and len(h.ranks) > 1]
    if not shared:
        return
    used = torch.tensor([p.grad is not None for p, _ in shared], dtype=torch.uint8)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=shared[0][1].host_group)
    for (parameter, owners), is_used in zip(shared, used.tolist(), strict=True):
        if is_used and owners.is_here:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            _add_others(local_of(parameter.grad), owners)


def _add_others(gradient: Tensor, owners: StageOwners) -> None:
    # Every owner adds in the same order, so that all have the same sum to the last bit.
    me = owners.group.rank()
    # Sending needs contiguous memory, whatever strides the gradient has taken over from the parameter.
    dense = torch.contiguous_format
    parts = {rank: torch.empty_like(gradient, memory_format=dense) for rank in owners.ranks}
    parts[me].copy_(gradient)
    others = [rank for rank in owners.ranks if rank != me]
    operations = [dist.P2POp(dist.isend, parts[me], group=owners.group, group_peer=rank) for rank in others]
    operations += [dist.P2POp(dist.irecv, parts[rank], group=owners.group, group_peer=rank) for rank in others]
    for work in dist.batch_isend_irecv(operations) if operations and gradient.numel() else ():
        work.wait()
    gradient.zero_()
    for rank in owners.ranks:
        gradient.add_(parts[rank])
