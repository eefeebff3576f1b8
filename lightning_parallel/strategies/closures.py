"""Closures, which optimizers call for the gradients of an update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS, Optimizer

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy


def closure_of_update(
    strategy: ParallelStrategy,
    optimizer: Optimizer,
    closure: Callable[[], Any],
    *,
    before_update: Sequence[Callable[[], None]],
) -> Callable[[], Any]:
    """Return `closure`, forward and backward of the last microstep, with what comes between it and the update.

    LBFGS decides by the losses that it returns: where to look along a line, and when to end. Each rank has the loss of
    its own samples, and gradients that are averaged. Without the mean of the losses ranks would decide differently, and
    each by a loss that is not that of its gradients. Other optimizers make no use of it, so nothing is reduced there.

    Args:
        strategy: Knows the ranks that read different samples.
        optimizer: The one that calls.
        closure: Runs inside of the optimizer's step, as does what follows it.
        before_update: Called after it, in order.
    """

    def run() -> Any:
        result = closure()
        for each in before_update:
            each()
        if not isinstance(optimizer, LBFGS) or result is None:
            return result
        loss = torch.as_tensor(result, device=strategy.root_device).detach().clone()
        return strategy.reduce(loss, reduce_op="mean")

    return run
