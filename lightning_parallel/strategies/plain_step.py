"""Training steps on a plain copy of the module, as one process would take them, without any side effect."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torch.distributed import ProcessGroup
from torchmetrics import Metric

from lightning_parallel import _torch
from lightning_parallel.module.held_objects import HeldObjects
from lightning_parallel.module.kept_state import KeptState, parameter_writes
from lightning_parallel.module.object_state import CONTAINERS, ObjectState
from lightning_parallel.ranks.dtensors import full_of
from lightning_parallel.ranks.random_streams import RandomState, unchanged_generators
from lightning_parallel.strategies.backward_scale import BackwardScale
from lightning_parallel.strategies.compared_metrics import MetricStates, follow_metrics, states_of_metrics
from lightning_parallel.strategies.plain_optimizers import FirstUpdate, PlainOptimizers, StillScheduler

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import Precision

_KEPT = (bool, int, float, str, type(None), *CONTAINERS)
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass
class StepValues:
    """The values that a training step has returned and logged.

    Args:
        loss: The loss; ``None`` where the step was skipped.
        logged: Name, and how many times it was logged before -> number, tensor or metric.
        metrics: The states of metrics after it.
        losses: Under manual optimization, what `manual_backward` was given.
        updates: Whether it has ended where the copy would update parameters.
    """

    loss: Tensor | None = None
    logged: dict[tuple[str, int], Any] = field(default_factory=dict)
    metrics: MetricStates = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    updates: bool = False

    def take_loss(self, output: Any) -> None:
        """Note the loss in the `output` of a training step."""
        loss = output.get("loss") if isinstance(output, dict) else output
        self.loss = full_of(loss).detach().clone() if isinstance(loss, Tensor) else None

    def take_metrics(self, module: LightningModule) -> None:
        """Note the states that the metrics of `module` have now."""
        self.metrics = states_of_metrics(module)

    @contextlib.contextmanager
    def of(self, module: LightningModule, *, passes_on: bool) -> Iterator[None]:
        """Note what `module` logs here.

        Args:
            module: The module that calls ``self.log``.
            passes_on: Whether it is logged, too.
        """
        own, log = vars(module).get("log"), module.log

        def noted(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            times = sum(1 for known, _ in self.logged if known == name)
            if passes_on:  # first: it refuses what only some ranks log, for which the next line would wait
                log(name, value, *args, **kwargs)
            self.logged[name, times] = full_of(value).detach().clone() if isinstance(value, Tensor) else value

        vars(module)["log"] = noted
        try:
            yield
        finally:
            if vars(module).get("log") is noted:
                del vars(module)["log"]
                if own is not None:
                    vars(module)["log"] = own

    def numbers(self) -> dict[str, Any]:
        """The logged values that are no metrics, by name; a value that was logged again has a number, too."""
        return {_label(*key): value for key, value in self.logged.items() if not isinstance(value, Metric)}

    def leave_out(self, names: Collection[str]) -> None:
        """Forget logged values.

        Args:
            names: As `numbers` has them.
        """
        self.logged = {key: value for key, value in self.logged.items() if _label(*key) not in names}


def _label(name: str, times: int) -> str:
    return name if times == 0 else f"{name} ({times + 1})"


class PlainSteps:
    """Training steps on a plain copy, which leave nothing behind but their values and gradients.

    Args:
        module: The user's module, parallel by now.
        plain: Its plain copy, filled.
        trainer: The trainer.
        device: The device on which both run.
        group: The ranks that read different samples; ``None`` for one process.
    """

    def __init__(
        self,
        module: LightningModule,
        plain: LightningModule,
        trainer: Trainer,
        device: torch.device,
        group: ProcessGroup | None = None,
    ) -> None:
        self.module, self.device, self.group = plain, device, group
        self._precision: Precision = trainer.precision_plugin
        self.originals = module
        self.draws = False
        """Whether a step has drawn random numbers."""
        self.in_hooks = StepValues()
        """The values that hooks around the last backward have logged."""
        self._trained: set[str] = set()
        self.written: set[str] = set()
        """The names of parameters that a step has written into."""
        self.given: tuple[Sequence[Any], dict[str, Any]] = (), {}
        """The arguments of the last step."""
        self.failure = ""
        """The error of a hook behind backward, which may take the gradients of shards for granted; empty without."""
        is_manual = not module.automatic_optimization
        self.optimizers = PlainOptimizers(trainer, module, plain, group) if is_manual else None
        self.scale = BackwardScale()
        others = self.optimizers.of_trainer if self.optimizers else {}
        plain.trainer = QuietTrainer(trainer, others)  # type: ignore[assignment]

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[StepValues, dict[str, Tensor]]:
        """Forward and backward of one training step, from the present random state, which stays as it is.

        Args:
            args: The arguments of the training step; copied, since a step may change its batch.
            kwargs: As `args`.

        Returns:
            What the step has returned and logged, and the gradients of its loss by the name of the parameter.
        """
        self.in_hooks = StepValues()
        follow_metrics(self.module, self.originals)  # which hooks have reset since, or given something
        self.before, self.given = KeptState(self.module), copy.deepcopy((args, kwargs))
        with self.alone(), self._apart(), parameter_writes(self.module, self.written):
            if self.optimizers is not None:
                values, gradients = self._run_to_update(self.optimizers, args, kwargs)
            else:
                values, loss = self._forward(args, kwargs)
                if loss is not None:
                    self._backward(loss)
                gradients = self.take_gradients()
        self._trained |= {name for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        return values, gradients

    def trained(self) -> dict[str, Tensor]:
        """The parameters, by their first names, that some step so far has trained: a step may freeze others."""
        return {name: each for name, each in self.module.named_parameters() if name in self._trained}

    def _run_to_update(
        self, optimizers: PlainOptimizers, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[StepValues, dict[str, Tensor]]:
        """A step that calls backward by itself, up to its first update; gradients stay for the next one."""
        optimizers.begin()
        values, _ = self._forward(args, kwargs)
        values.losses = optimizers.losses
        return values, optimizers.gradients

    @property
    def scales_alike(self) -> bool:
        """Whether gradients of the copy are multiplied by nothing that the step has given to `manual_backward`."""
        return self.optimizers is None or self.optimizers.scales_alike

    def run_forward(self, args: Sequence[Any], kwargs: dict[str, Any], times: float = 0.0) -> StepValues:
        """A training step from the present random state, which stays as it is.

        Args:
            args: As those of `run`.
            kwargs: The same.
            times: What its loss is multiplied by for a backward, whose gradients add up; none for zero.
        """
        with self.alone():
            values, loss = self._forward(args, kwargs)
            if times and loss is not None:
                (times * loss).backward()
        return values

    def run_again(
        self, state: RandomState, watching: contextlib.AbstractContextManager[object] | None = None
    ) -> StepValues:
        """The last step without backward, from where it began.

        Args:
            state: The random state before it.
            watching: A context in which it runs.
        """
        now, gradients = RandomState.take(self.device), [(p, p.grad) for p in self.module.parameters()]
        self.before.restore()
        state.restore(self.device)
        if self.optimizers is not None:
            self.optimizers.begin()
        for parameter, gradient in gradients:  # a step that optimizes by itself goes backward, too
            parameter.grad = None if gradient is None else gradient.clone()
        try:
            with watching or contextlib.nullcontext():
                return self.run_forward(*self.given)
        finally:
            now.restore(self.device)
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def _forward(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[StepValues, Tensor | None]:
        values, before, output = StepValues(), RandomState.take(self.device), None
        held = HeldObjects(self.module.modules())  # with generators of its own
        of_ranks = contextlib.nullcontext() if self.optimizers is None else self.optimizers.step()
        with of_ranks, values.of(self.module, passes_on=False), self._precision.train_step_context():
            try:
                output = self.module.training_step(*copy.deepcopy(args), **copy.deepcopy(kwargs))
            except FirstUpdate:
                values.updates = True
        after = RandomState.take(self.device)
        self.draws = self.draws or held.has_drawn or not _equal(before, after)
        values.take_loss(output)
        values.take_metrics(self.module)
        loss = output.get("loss") if isinstance(output, dict) else output
        return values, loss if isinstance(loss, Tensor) else None

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients of the copy, by the first name of each parameter, which has none afterwards."""
        gradients = {name: dense(p.grad) for name, p in self.module.named_parameters() if p.grad is not None}
        for parameter in self.module.parameters():
            parameter.grad = None
        return gradients

    def after_backward(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Call the user's hook on the copy.

        Args:
            gradients: Name of a parameter -> its complete gradient.

        Returns:
            The gradients as the hook leaves them.
        """
        for name, parameter in self.module.named_parameters():
            parameter.grad = gradients.get(name)
        with self.alone(), self.in_hooks.of(self.module, passes_on=False):
            try:
                self.module.on_after_backward()
            except Exception as error:  # of the user's code; the real hook has raised none
                self.failure = f"on_after_backward of a plain copy of the module raised {type(error).__name__}: {error}"
        self.in_hooks.take_metrics(self.module)
        return self.take_gradients()

    def _backward(self, loss: Tensor) -> None:
        loss = loss / self.module.trainer.accumulate_grad_batches  # as Lightning does, before hooks
        with self.in_hooks.of(self.module, passes_on=False):
            self.module.on_before_backward(loss)
            self.scale = BackwardScale(loss)
            self.module.backward(loss)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let nothing be printed, warned, drawn or changed in the module itself, which closures may refer to."""
        attributes = [
            ObjectState(child, lambda name, value: type(value) in _KEPT and name not in _TABLES)
            for child in self.originals.modules()
        ]
        with contextlib.ExitStack() as stack:
            stack.enter_context(unchanged_generators(self.device))
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(warnings.catch_warnings(action="ignore"))
            stack.enter_context(_torch.modes.outside_of_all())
            if self.group is not None:  # ranks that share samples would each add a summand of what one process has
                stack.enter_context(_torch.groups.all_ranks_are(self.group))
            try:
                yield
            finally:
                for each in attributes:
                    each.restore(keeps_new=False)

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Refuse gradients of the module itself, to which functions may refer that the copy shares with it."""
        before = [(parameter, parameter.grad) for parameter in self.originals.parameters()]
        try:
            yield
        finally:
            mixed = [parameter for parameter, gradient in before if parameter.grad is not gradient]
            for parameter, gradient in before:
                parameter.grad = gradient
        if mixed:
            raise RuntimeError(f"its step uses {len(mixed)} parameters of the module itself")


class QuietTrainer:
    """A trainer that logs nowhere, and takes what is set on it for itself.

    Args:
        trainer: The real one.
        others: Attributes that it has in place of the real ones.
    """

    def __init__(self, trainer: Trainer, others: Mapping[str, Any]) -> None:
        vars(self).update(others, _trainer=trainer)

    def __getattr__(self, name: str) -> Any:
        trainer = vars(self)["_trainer"]
        if name == "loggers":
            return [DummyLogger() for _ in trainer.loggers]
        if name == "logger":
            return DummyLogger() if trainer.loggers else None
        if name == "lr_scheduler_configs":
            return [replace(each, scheduler=StillScheduler(each.scheduler)) for each in trainer.lr_scheduler_configs]
        return getattr(trainer, name)


def dense(gradient: Tensor) -> Tensor:
    """The same gradient, where an embedding has made a sparse one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _equal(first: RandomState, second: RandomState) -> bool:
    if not torch.equal(first.host, second.host) or first.python != second.python:
        return False
    if first.device is not None and second.device is not None and not torch.equal(first.device, second.device):
        return False
    return bool((first.numpy[1] == second.numpy[1]).all()) and first.numpy[2:] == second.numpy[2:]
