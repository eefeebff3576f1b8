"""The calls that a strategy makes around its steps; where the module is whole, most of them do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.policies import Policies
from lightning_parallel.techniques.accumulation import ZeroGrad
from lightning_parallel.techniques.local_update import LocalUpdate
from lightning_parallel.techniques.offload import OffloadedState
from lightning_parallel.techniques.update_in_backward import UpdateInBackward


class StepHooks:
    """Calls that a strategy makes around its steps, in this order; for a whole module, most do nothing.

    A microstep is begin, forward, backward; a window is one or more microsteps and the update.

    Args:
        policies: The rules.
    """

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._on_optimizers: list[OffloadedState | UpdateInBackward | ZeroGrad | LocalUpdate] = []

    def adopt(self, optimizers: Sequence[Optimizer], handed_out: Sequence[Any] = ()) -> None:
        """Let `optimizers` step as the policies say.

        Args:
            optimizers: The user's.
            handed_out: Lightning's wrappers that the module sees in their place, with a `zero_grad` of their own.
        """
        if self._policies.offload == "optimizer":
            self._on_optimizers += [OffloadedState(optimizer) for optimizer in optimizers]

    def check_calls(self) -> None:
        """Refuse a step in which ranks that share parameters have called different units. A collective."""

    def state_was_loaded(self) -> None:
        """Move optimizer state that a checkpoint put on the device back to host memory, if it is offloaded."""
        for added in self._on_optimizers:
            if isinstance(added, OffloadedState):
                added.store()

    meets_in_steps = False
    """Whether all ranks have to run a step together, as those do that gather parameters in it."""

    @property
    def place(self) -> str:
        """Where in a step this rank is; ranks that have called the same units return the same."""
        return ""

    def begin(self) -> None:
        """Call it before a training step, and before a loop without training."""

    def forward(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a step's own code."""
        return contextlib.nullcontext()

    def around_step(self) -> contextlib.AbstractContextManager[None]:
        """Open it around each run of a training step, behind which ranks may meet before its backward."""
        return contextlib.nullcontext()

    def after_forward(self) -> None:
        """Call it between forward and backward of a training step."""

    def after_evaluation(self) -> None:
        """Call it after a step without backward."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a backward is not the last of its window."""
        return contextlib.nullcontext()

    def before_backward(self, loss: Tensor) -> None:
        """Call it before a backward through `loss`."""

    def after_backward(self) -> None:
        """Call it after a backward."""

    def before_update(self) -> None:
        """Call it after the last backward of a window, before the optimizer steps."""

    def after_update(self, optimizer: Optimizer) -> None:
        """Call it when `optimizer` has used its gradients."""

    def tried(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a microstep that is tried, and whose gradients are dropped when it closes."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Give the optimizers back as they were."""
        for added in self._on_optimizers:
            added.detach()
        self._on_optimizers = []
