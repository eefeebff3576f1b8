"""Hooks that a user has registered on parameters, as one process would call them: with the gradient of all samples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel import _torch

_NOT_OF_USERS = ("torch", "lightning_parallel")


class ParameterHooks(NamedTuple):
    """The hooks of one parameter.

    Args:
        of_gradient: Given each gradient before it is added to what is there; may return another one.
        behind: Given the parameter, behind that.
    """

    of_gradient: list[Callable[..., Any]]
    behind: list[Callable[..., Any]]

    def replaced(self, gradient: Tensor) -> Tensor:
        """The gradient that the hooks make of one."""
        with torch.no_grad():
            for hook in self.of_gradient:
                result = hook(gradient)
                gradient = gradient if result is None else result
        return gradient

    def behind_sum(self, parameter: Tensor, total: Tensor) -> Tensor:
        """The sum that the later ones make of a sum of gradients.

        Args:
            parameter: The parameter that they are given.
            total: The sum.
        """
        parameter.grad = total
        with torch.no_grad():
            for hook in self.behind:
                hook(parameter)
        total, parameter.grad = total if parameter.grad is None else parameter.grad, None
        return total


def parameter_hooks(module: nn.Module) -> dict[str, ParameterHooks]:
    """The hooks of users on the parameters of a module, by the first name of each.

    Args:
        module: Any module, with parameters that are whole.
    """
    found = {}
    for name, parameter in module.named_parameters():
        hooks = ParameterHooks(
            *([hook for hook in each if _is_of_user(hook)] for each in _torch.autograd.hooks_of(parameter))
        )
        if hooks.of_gradient or hooks.behind:
            found[name] = hooks
    return found


def mean_gradient(gradient: Tensor | None, parameter: Tensor, group: dist.ProcessGroup | None) -> Tensor | None:
    """The mean over ranks of the gradient of one parameter; ``None`` if no rank has any. A collective.

    Args:
        gradient: That of this rank.
        parameter: Its parameter.
        group: The ranks that read different samples; ``None`` for one process.
    """
    if group is None or group.size() == 1:
        return gradient
    mean = torch.zeros_like(parameter) if gradient is None else gradient.clone()
    count = torch.tensor(float(gradient is not None), device=mean.device)
    for each in (mean, count):
        dist.all_reduce(each, group=group)
    return mean / group.size() if count else None


def _is_of_user(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).partition(".")[0] not in _NOT_OF_USERS
