"""Strategies that plan the changes to a module: refusals, the plan, and Lightning's hooks around a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _lightning, _torch
from lightning_parallel.plan import Plan, build_plan, module_key
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.step_hooks import StepHooks
from lightning_parallel.strategies.closures import closure_of_update
from lightning_parallel.strategies.first_step import FirstStep
from lightning_parallel.strategies.joint_updates import JointUpdates
from lightning_parallel.strategies.optimizers import tell_missing_states
from lightning_parallel.strategies.positioned_strategy import PositionedStrategy
from lightning_parallel.strategies.precision import widen
from lightning_parallel.strategies.refusals import module_violations, without_unmovable_module
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.techniques.deferred_init.deferral import Deferral

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_LIBRARIES = ("lightning", "lightning_parallel")
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


class PlannedStrategy(PositionedStrategy):
    """A strategy that plans the changes to a module.

    Args:
        policies: The rules, without those that depend on the module.
        check: Whether the first step is compared with one process: `CHECKS`.
        saving: How checkpoints are written, and how a run ends.
    """

    def __init__(self, policies: Policies, *, check: str = "auto", saving: Saving | None = None) -> None:
        super().__init__(saving or Saving())
        self.num_nodes = 1
        self._policies = policies
        self._planned: tuple[Any, Plan] | None = None
        self._steps = StepHooks(policies)
        self.first_step = FirstStep(self, check)
        self._deferral = Deferral(tell=rank_zero_info)
        self._joint_updates = JointUpdates()

    defers_init = False
    """Whether `configure_model` is recorded instead of run, so that no rank holds the whole module."""

    @property
    def steps(self) -> StepHooks:
        """The calls around a step."""
        return self._steps

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def replica_devices(self) -> list[torch.device]:
        """Devices of this process; where there are several, each batch is split over copies of the module on them."""
        return [self.root_device]

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated before all gradients are there, so that nothing can be done to these."""
        return self._policies.optimizer_in_backward

    @property
    def cuts_stack(self) -> bool:
        """Whether ranks have other layers than others."""
        return self.degrees.pipeline != 1

    @property
    def cuts_batches(self) -> bool:
        """Whether the batch of a rank runs in parts, each of which is averaged over its samples alone."""
        module = self.lightning_module
        return self.cuts_stack and (module is None or not self.policies_for(module).takes_turns)

    @property
    def can_leave_out_layers(self) -> bool:
        """Whether a step may go through some of the layers only; the reducer of DDP waits for the gradients of all."""
        return False

    @property
    def degrees(self) -> Degrees:
        """The resolved degrees; they need the devices, so a Trainer."""
        return Degrees(replicate=self.num_nodes * self.num_processes or 1, shard=1)

    def policies_for(self, module: LightningModule) -> Policies:
        """The rules, with those that depend on `module`."""
        return _policies_for(module, self._policies)

    def plan_for(self, module: LightningModule) -> Plan:
        """The plan of `module` as it is now: made once, and again only where the module or the rules have changed."""
        degrees, policies = self.degrees, self.policies_for(module)
        key = (module_key(module), degrees, policies)
        if self._planned is None or self._planned[0] != key:
            self._planned = key, build_plan(module, degrees, policies)
        return self._planned[1]

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        return module_violations(module, is_fitting, self._deferral.record, sends_tensors=self.sends_tensors)

    @override
    def setup_environment(self) -> None:
        _torch.groups.leave_to_parents()
        super().setup_environment()
        # One rank holds the whole module anyway, which callbacks may then copy before it is set up.
        self._deferral.attach(self.module, to_meta=self.defers_init and self.world_size > 1)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self._deferral.give_back()
        self.accelerator.setup(trainer)
        self.check_module(self.module, is_built=True)
        self.first_step.begin(trainer)
        self.take_signals(trainer)

    @override
    def teardown(self) -> None:
        self.abandon_save()
        self.end_watching()
        self.steps.close()
        self.first_step.end()
        self._planned = None
        self._deferral.detach()
        with without_unmovable_module(self):
            super().teardown()

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        widen(self.lightning_module, self.precision_plugin)
        super().load_model_state_dict(checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        tell_missing_states(self.optimizers, checkpoint["optimizer_states"])
        super().load_optimizer_state_dict(checkpoint)
        self.steps.state_was_loaded()

    @override
    def place_in_step(self) -> str:
        return self.steps.place

    def before_step(self, name: str, args: Sequence[Any]) -> None:
        """Called before a step runs, and before its gradients are held back. A collective where it does anything.

        Args:
            name: The step's name.
            args: Its arguments.
        """

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.steps.begin()
        with self.steps.forward():
            output = self.first_step.run(self._run_step, args, kwargs)
        self.steps.after_forward()
        return output

    def _run_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.steps.around_step():
            return super().training_step(*args, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.steps.held(), self.first_step.held():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self.steps.before_backward(closure_loss)
        self.first_step.before_backward(closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        self.steps.after_backward()
        self.first_step.after_backward()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        before_update = (self.steps.before_update, self.first_step.before_update)
        closure = closure_of_update(self, optimizer, closure, before_update=before_update)
        with self._joint_updates.watched(optimizer, closure, self.joint_refusal) as watched:
            result = super().optimizer_step(optimizer, watched, model, **kwargs)
        self.steps.after_update(optimizer)
        return result

    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step without backward.

        Args:
            name: Its name.
            args: What it takes.
            kwargs: What it takes by name.
        """
        self.before_step(name, args)
        with self.steps.forward():
            result = getattr(super(), name)(*args, **kwargs)
        self.steps.after_evaluation()
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluate("validation_step", args, kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluate("test_step", args, kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.evaluate("predict_step", args, kwargs)

    @override
    def on_validation_start(self) -> None:
        self.steps.begin()

    on_test_start = on_predict_start = on_validation_start


def _policies_for(module: LightningModule, policies: Policies) -> Policies:
    is_manual = not module.automatic_optimization
    sees_gradients = _has_hook("on_after_backward", module) or is_overridden("backward", module)
    if sees_gradients and not is_manual:
        policies = policies.with_gradients_shown()
    if _has_hook("on_before_zero_grad", module) or is_overridden("optimizer_zero_grad", module):
        policies = replace(policies, frees_before_backward=True)
    steps = tuple(name for name in STEP_METHODS if is_overridden(name, module))
    return replace(policies, step_methods=steps, backward_in_step=is_manual)


def _has_hook(name: str, module: LightningModule) -> bool:
    """Whether the module has a hook, or a callback of the user's; those of libraries do not look at gradients in it."""
    trainer = _lightning.attached_trainer(module)
    callbacks = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    own = [each for each in callbacks if type(each).__module__.partition(".")[0] not in _LIBRARIES]
    return any(is_overridden(name, each) for each in (module, *own))
