"""Optimizers that a plain copy finds in its step under manual optimization: the first update ends the step instead."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_parallel import _lightning
from lightning_parallel.strategies.copied_gradients import CopiedGradients

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class FirstUpdate(BaseException):
    """Ends a step of the copy where it would update for the first time; no error, so that no step handles it."""


class PlainOptimizers:
    """Optimizers and a strategy in place of those of a trainer, for steps of a plain copy.

    Args:
        trainer: The trainer.
        module: The module, whose parameters its optimizers train.
        plain: The copy.
        group: The ranks that read different samples; ``None`` for one process.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, plain: LightningModule, group: ProcessGroup | None
    ) -> None:
        self._plain = plain
        self.of_ranks = CopiedGradients(plain, group)
        """The gradients, averaged over these ranks."""
        own = dict(plain.named_parameters())
        twins = {parameter: own[name] for name, parameter in module.named_parameters()}
        self.losses: list[Tensor] = []
        """The losses that `manual_backward` was given in this step."""
        self.gradients: dict[str, Tensor] = {}
        """The gradients after the last of them, by the name of the parameter."""
        self._runs_backward = True
        self.scales_alike = True
        """Whether backward began with ones: nothing was given to multiply gradients by."""
        optimizers = [_without_updates(optimizer, twins) for optimizer in trainer.optimizers]
        strategy = _PlainStrategy(trainer.strategy, plain, self.backward)
        vars(strategy)[_lightning.HANDED_OUT] = [_lightning.handed_out(each, strategy) for each in optimizers]
        self.of_trainer = {"strategy": strategy, "optimizers": optimizers}
        """Attributes of a trainer that are others for the copy."""

    def begin(self, *, runs_backward: bool = True) -> None:
        """Begin with a step.

        Args:
            runs_backward: Whether its backward runs, over all ranks; else only its losses are noted, of this rank.
        """
        self.losses, self.gradients, self._runs_backward = [], {}, runs_backward

    def step(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the step runs. A collective if its backward runs."""
        return self.of_ranks.step() if self._runs_backward else contextlib.nullcontext()

    def backward(self, loss: Tensor, optimizer: object = None, *args: Any, **kwargs: Any) -> Tensor:
        """Run backward as a strategy does.

        Args:
            loss: The loss.
            optimizer: As Lightning passes it; not used.
            *args: For `LightningModule.backward`.
            **kwargs: The same.
        """
        self.scales_alike = self.scales_alike and not args and kwargs.get("gradient") is None
        self.losses.append(loss.detach().clone())
        if not self._runs_backward:
            return loss.detach()
        self._plain.on_before_backward(loss)
        with self.of_ranks.backward():
            self._plain.backward(loss, *args, **kwargs)
        named = self._plain.named_parameters()
        self.gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
        return loss.detach()


class _PlainStrategy:
    """A strategy under which nothing is updated.

    Args:
        strategy: The real one, for everything else.
        plain: The copy.
        backward: Runs backward.
    """

    def __init__(self, strategy: Any, plain: LightningModule, backward: Callable[..., Tensor]) -> None:
        self.lightning_module, self.backward, self._real = plain, backward, strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_real"], name)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> NoReturn:
        """End the step, behind the gradients of its first update."""
        closure()
        raise FirstUpdate


class StillScheduler:
    """A scheduler that does not step.

    Args:
        scheduler: The real one, which is read.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_scheduler"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


def _without_updates(optimizer: Optimizer, twins: dict[Any, Any]) -> Optimizer:
    """An optimizer of the same class and settings for the parameters of a copy, whose step ends that of the module."""

    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> NoReturn:
        if closure is not None:
            closure()
        raise FirstUpdate

    twin = copy.copy(optimizer)
    twin.param_groups = [
        {**group, "params": [twins.get(parameter, parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    twin.step = step  # type: ignore[method-assign]
    return twin
