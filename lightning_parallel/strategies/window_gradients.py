"""Gradients of a plain copy over an accumulation window, added up and cleared as the module's own are."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.strategies.backward_scale import BackwardScale
from lightning_parallel.strategies.parameter_hooks import ParameterHooks, mean_gradient, parameter_hooks
from lightning_parallel.strategies.plain_step import PlainSteps


class WindowGradients:
    """The sums of the gradients of the copy's steps.

    Args:
        plain: The steps of the copy.
    """

    def __init__(self, plain: PlainSteps) -> None:
        self._plain = plain
        self.pending: dict[str, Tensor] = {}
        """Those of the last step, until the backward of the real one."""
        self.sums: dict[str, Tensor] = {}
        """Name of a parameter -> the sum over the window's steps so far."""
        self.used: set[str] = set()
        """Names of parameters that have a gradient in one process."""
        self.hooked: set[str] = set()
        """Names of those that have hooks of their own."""
        self._hooks: dict[str, ParameterHooks] = {}
        self.scale = BackwardScale()
        """That of the real backward."""

    def begin(self, loss: Tensor) -> None:
        """Note what the backward of `loss` is about to multiply and call: a hook may remove itself.

        Args:
            loss: The real one.
        """
        self.scale, self._hooks = BackwardScale(loss), parameter_hooks(self._plain.originals)

    def add(self, group: dist.ProcessGroup | None) -> None:
        """Add those of the last step, multiplied as the real backward has multiplied its own.

        Args:
            group: As that of `averaged`. Where parameters have hooks, this is a collective.
        """
        self.take(self.scale.over(self._plain.scale), group)

    def take(self, factor: Any, group: dist.ProcessGroup | None) -> None:
        """Add those of the last step, multiplied.

        Args:
            factor: By what; ``None`` for nothing.
            group: As that of `add`.
        """
        if factor is not None:
            self.pending = {name: gradient * factor for name, gradient in self.pending.items()}
        hooks, parameters = self._hooks, self._plain.trained()
        self.hooked |= hooks.keys()
        with self._plain.alone():
            for name in [name for name in hooks if name in parameters]:  # in the same order on all ranks
                mean = mean_gradient(self.pending.pop(name, None), parameters[name], group)
                if mean is not None:
                    with _errors_noted(self._plain, name):
                        self.pending[name] = mean
                        self.pending[name] = hooks[name].replaced(mean)
            for name, gradient in self.pending.items():
                self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
            for name in self.pending.keys() & hooks.keys():
                with _errors_noted(self._plain, name):
                    self.sums[name] = hooks[name].behind_sum(parameters[name], self.sums[name])
        self.used |= self.pending.keys()
        self.pending = {}

    def clear(self, optimizer: Optimizer) -> None:
        """Forget the sums, as `optimizer` has just cleared its gradients: a step need not update before the next."""
        self.sums = {}
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            self.used = set()

    def averaged(self, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
        """The sums, averaged over the ranks that read different samples, and given to hooks. A collective.

        Args:
            group: Those ranks; ``None`` for one process.
        """
        size, result = 1 if group is None else group.size(), {}
        for name, parameter in self._plain.trained().items():
            gradient = self.sums.pop(name, None)
            gradient = torch.zeros_like(parameter) if gradient is None else gradient.contiguous()
            if size > 1:
                dist.all_reduce(gradient, group=group)
                gradient /= size
            result[name] = gradient
        return self._plain.after_backward(result)


@contextlib.contextmanager
def _errors_noted(plain: PlainSteps, name: str) -> Iterator[None]:
    """Inside this context, an error of a hook ends the comparison, and no more: the real call has raised none."""
    try:
        yield
    except Exception as error:
        plain.failure = f"a hook of {name}, called once more for a plain copy, raised {type(error).__name__}: {error}"


@contextlib.contextmanager
def clearing_noted(optimizer: Any, note: Callable[[Any], None]) -> Iterator[None]:
    """Inside this context, `note` is called with `optimizer` whenever its `zero_grad` has run.

    Args:
        optimizer: The optimizer.
        note: Takes it.
    """
    before, plain = vars(optimizer).get("zero_grad"), optimizer.zero_grad

    @functools.wraps(plain)
    def zero_grad(*args: Any, **kwargs: Any) -> None:
        plain(*args, **kwargs)
        note(optimizer)

    optimizer.zero_grad = zero_grad
    try:
        yield
    finally:
        if vars(optimizer).get("zero_grad") is zero_grad:
            del optimizer.zero_grad
            if before is not None:
                optimizer.zero_grad = before
