"""`ScaledLearningRate`: the linear rule with gradual warm-up, on top of any schedule."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel.callbacks.batch_geometry import (
    Microstep,
    batch_size_of,
    num_readers,
    size_violations,
)
from lightning_parallel.callbacks.strategy_protocol import refuse, updates_in_backward
from lightning_parallel.errors import check

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_WARMUP_EPOCHS = 5.0


class ScaledLearningRate(Callback):
    """Multiply the learning rate by ``k = global batch / reference_batch``, ramping linearly from 1 to k (warm-up).

    Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD". Update ``n`` (from 0) of an optimizer uses its rate
    times ``1 + (k - 1) * min(n / steps, 1)``. Below the reference batch k is less than 1, and the factor falls to it.

    The factor is in ``group["lr"]`` only while the optimizer's own code runs. Everything else reads and writes the rate
    of the schedule: schedulers, monitors, checkpoints, and also `training_step` and hooks which Lightning runs inside
    ``optimizer.step`` as its closure. So any scheduler works, and the factor is never applied twice.

    The global batch is the loader's batch x the ranks that read x `trainer.accumulate_grad_batches`, as it is at each
    update. Under manual optimization, accumulation inside the module is not seen.

    Args:
        reference_batch: The global batch, in samples, for which the module's learning rate was chosen.
        warmup_epochs: Length of the ramp in epochs; 0 for none. Under manual optimization each optimizer is taken to
            step once a batch.
        warmup_steps: Length of the ramp in updates of an optimizer, in place of `warmup_epochs`.
        batch_size: Samples that one rank reads for one `training_step`, where the loader does not say.
        log: The name under which to log the factor of the last update; with several optimizers, its number follows.

    Raises:
        ConfigurationError: At the start of training, with every reason at once.

    Example:
        >>> Trainer(strategy="ddp_custom", devices=8, callbacks=[ScaledLearningRate(256)])
    """

    def __init__(
        self,
        reference_batch: int,
        *,
        warmup_epochs: float = _WARMUP_EPOCHS,
        warmup_steps: int | None = None,
        batch_size: int | None = None,
        log: str | None = None,
    ) -> None:
        check(
            [
                *size_violations(reference_batch=reference_batch, batch_size=batch_size),
                *_ramp_violations(warmup_epochs, warmup_steps),
            ]
        )
        self._reference_batch = reference_batch
        self._warmup_epochs = warmup_epochs
        self._warmup_steps = warmup_steps
        self._batch_size = batch_size
        self._log = log
        self._microstep = Microstep(0, 0)
        self._num_updates: list[int] = []
        self._scaled: list[_ScaledUpdates] = []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": [scaled.num_updates for scaled in self._scaled] or list(self._num_updates)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._num_updates = list(state_dict["num_updates"])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = [optimizer for optimizer in trainer.optimizers if optimizer.param_groups]
        self._microstep, violations = self._find_microstep(trainer)
        ramp, found = self._ramp(trainer)
        refuse(trainer, [*violations, *found, *_update_violations(trainer, optimizers)])
        if trainer.global_step == 0 or len(self._num_updates) != len(optimizers):
            self._num_updates = [0] * len(optimizers)
        factor = partial(self._factor, trainer, ramp)
        self._scaled = [_ScaledUpdates(o, factor, n) for o, n in zip(optimizers, self._num_updates, strict=True)]
        accumulation = _accumulation(trainer, trainer.current_epoch)
        samples = self._microstep.num_samples * accumulation
        rank_zero_info(
            f"ScaledLearningRate: the global batch is {samples} = {self._microstep} x {accumulation} microsteps, so "
            f"k = {samples / self._reference_batch:g} for reference_batch={self._reference_batch}; the rate is "
            + (f"multiplied by 1 at first and by k after {ramp} updates" if ramp else "multiplied by k")
        )

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._microstep, violations = self._find_microstep(trainer)  # there may be another loader in each epoch
        refuse(trainer, violations)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for number, scaled in enumerate(self._scaled):
            scaled.give_back()  # a module under manual optimization may have caught the error of a step
            if self._log is not None and scaled.factor is not None:
                name = self._log if len(self._scaled) == 1 else f"{self._log}_{number}"
                pl_module.log(name, scaled.factor, on_step=True, on_epoch=False)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._detach()

    def _detach(self) -> None:
        if self._scaled:
            self._num_updates = [scaled.num_updates for scaled in self._scaled]
        for scaled in self._scaled:
            scaled.detach()
        self._scaled = []

    def _factor(self, trainer: Trainer, ramp: int, num_updates: int) -> float:
        k = self._microstep.num_samples * trainer.accumulate_grad_batches / self._reference_batch
        return k if num_updates >= ramp else 1 + (k - 1) * (num_updates / ramp)

    def _find_microstep(self, trainer: Trainer) -> tuple[Microstep, list[str]]:
        batch_size, violations = batch_size_of(trainer.train_dataloader, self._batch_size)
        return Microstep(batch_size, num_readers(trainer)), violations

    def _ramp(self, trainer: Trainer) -> tuple[int, list[str]]:
        """The length of the ramp in updates, and why there is none."""
        if self._warmup_steps is not None or self._warmup_epochs == 0:
            return self._warmup_steps or 0, []
        num_batches = trainer.num_training_batches
        if math.isinf(num_batches):
            return 0, [
                f"the training loader has no length, so warmup_epochs={self._warmup_epochs:g} is no number of updates; "
                "give warmup_steps="
            ]
        steps, whole = 0.0, math.floor(self._warmup_epochs)
        for epoch in range(whole + 1):
            share = 1.0 if epoch < whole else self._warmup_epochs - whole
            steps += share * math.ceil(num_batches / _accumulation(trainer, epoch))
        return round(steps), []


class _ScaledUpdates:
    """Multiplies the rates of an optimizer while its own code runs, by hooks on it; `detach` takes them off.

    Args:
        optimizer: Its groups have ``"lr"``, a number or a tensor.
        factor: Maps the number of updates made so far to the factor of the rates.
        num_updates: The updates made before, in an earlier fit.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float], num_updates: int) -> None:
        self.num_updates = num_updates
        self.factor: float | None = None
        self._optimizer = optimizer
        self._factor = factor
        self._depth = 0
        self._own_rates: list[tuple[dict[str, Any], Any, Tensor | None]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def detach(self) -> None:
        """Take the hooks off, with the optimizer's own rates in place."""
        self.give_back()
        for handle in self._handles:
            handle.remove()

    def give_back(self) -> None:
        """Put the optimizer's own rates back, also after a step that raised."""
        self._depth = 0
        self._restore()

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._depth += 1
        if self._depth > 1:  # a step that calls its parent class's step, which runs the hooks again
            return None
        self.factor = self._factor(self.num_updates)
        self._scale()
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": self._at_own_rates(kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):  # torch counts the optimizer itself as the first argument
            return (args[0], self._at_own_rates(args[1]), *args[2:]), kwargs
        return None

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._restore()
            self.num_updates += 1

    def _at_own_rates(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure is code of the module and of hooks: it finds its own rates, and may set them."""

        def closure_at_own_rates() -> Any:
            self._restore()
            try:
                result = closure()
            except BaseException:
                self.give_back()
                raise
            self._scale()
            return result

        return closure_at_own_rates

    @torch.no_grad()
    def _scale(self) -> None:
        assert self.factor is not None
        seen: set[int] = set()
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            if not isinstance(rate, Tensor):
                self._own_rates.append((group, rate, None))
                group["lr"] = rate * self.factor
            elif id(rate) not in seen:  # one tensor may be the rate of several groups
                seen.add(id(rate))
                self._own_rates.append((group, rate, rate.clone()))
                rate.mul_(self.factor)  # in place: captured and compiled steps hold on to the tensor

    @torch.no_grad()
    def _restore(self) -> None:
        for group, rate, value in self._own_rates:
            if value is None:
                group["lr"] = rate
            else:
                rate.copy_(value)
        self._own_rates = []


def _accumulation(trainer: Trainer, epoch: int) -> int:
    """Microsteps of an optimizer step in `epoch`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches


def _ramp_violations(warmup_epochs: float, warmup_steps: int | None) -> list[str]:
    found = []
    if not 0 <= warmup_epochs < math.inf:
        found.append(f"warmup_epochs={warmup_epochs} is no length of a ramp; give 0 or more")
    if warmup_steps is not None and warmup_steps < 0:
        found.append(f"warmup_steps={warmup_steps} is no length of a ramp; give 0 or more")
    if warmup_steps is not None and warmup_epochs != _WARMUP_EPOCHS:
        found.append(
            f"warmup_epochs={warmup_epochs:g} and warmup_steps={warmup_steps} are two lengths of one ramp; give one"
        )
    return found


def _update_violations(trainer: Trainer, optimizers: list[Any]) -> list[str]:
    """Reasons why updates of these optimizers cannot be scaled by hooks on their steps."""
    found = []
    if updates_in_backward(trainer):
        found.append(
            "ScaledLearningRate sets the rate for each step of an optimizer, but optimizer_in_backward=True updates "
            "parameters before it; leave one of the two out"
        )
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            found.append(
                f"{name} is no torch.optim.Optimizer, so its steps have no hooks; leave ScaledLearningRate out"
            )
        elif any("lr" not in group for group in optimizer.param_groups):
            found.append(f'{name} has groups without "lr", so there is no rate to scale; leave ScaledLearningRate out')
    return found
