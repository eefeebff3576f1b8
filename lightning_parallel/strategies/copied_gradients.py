"""Gradients of the copies of several ranks, averaged behind each backward of a step that optimizes by itself.

Such a step may look at gradients before it goes on: sharpness-aware minimization (Foret et al. 2021) and adversarial
perturbations move parameters along them, and begin again. Under a strategy it sees averages.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.ranks.objects import of_all_ranks


class CopiedGradients:
    """Averages gradients of a step for as long as all ranks call backward; a rank that ends or fails leaves.

    Args:
        module: This rank's copy.
        group: The ranks that read different samples; ``None`` for one process.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._group = group
        self._are_met = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Inside this context, a step runs on all ranks. A collective at its end."""
        self._are_met = self._group is not None and self._group.size() > 1
        try:
            yield
        finally:
            if self._are_met:
                of_all_ranks(None)
            self._are_met = False

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside this context, backward runs, and its gradients are averaged. A collective while all ranks come."""
        if not self._are_met:
            yield
            return
        parameters = dict(self._module.named_parameters())
        before = {name: parameter.grad for name, parameter in parameters.items()}
        for parameter in parameters.values():
            parameter.grad = None
        yield
        found = of_all_ranks([name for name, parameter in parameters.items() if parameter.grad is not None])
        self._are_met = all(names is not None for names in found)
        used = {name for names in found for name in names or ()}
        for name, parameter in parameters.items():
            if self._are_met and name in used:
                parameter.grad = self._averaged(parameter)
            if (earlier := before[name]) is not None:
                parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad

    def _averaged(self, parameter: nn.Parameter) -> Tensor:
        assert self._group is not None
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        gradient = gradient.to_dense() if gradient.is_sparse else gradient
        dist.all_reduce(gradient, group=self._group)
        return gradient / self._group.size()
