"""Train a few steps and restore everything afterwards, for searches before training."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_parallel import _lightning
from lightning_parallel.callbacks.strategy_protocol import PlannedSteps, SettlesCut, replica_devices
from lightning_parallel.module.object_state import CONTAINERS, Numbers, ObjectState
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.techniques.sharding import reshard_units

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def run_steps(trainer: Trainer, steps: int) -> None:
    """Take optimizer steps as an epoch would, from the loader that the trainer has.

    Args:
        trainer: The trainer, in `on_fit_start`, with a loader.
        steps: Number of optimizer steps.
    """
    module, epoch_loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
    fetcher = _lightning.training_fetcher(trainer)
    assert fetcher is not None
    _lightning.call_module_hook(trainer, "on_train_start")
    _lightning.call_module_hook(trainer, "on_train_epoch_start")
    epoch_loop.batch_progress.reset_on_run()
    with contextlib.suppress(StopIteration):  # the loader has no length and ended, or a hook of the module said so
        microsteps = 0
        while microsteps < steps * trainer.accumulate_grad_batches or _lightning.is_accumulating(trainer):
            if fetcher.done:
                iter(fetcher)
                epoch_loop.batch_progress.reset_on_run()
            epoch_loop.advance(fetcher)
            microsteps += 1
    module.zero_grad(set_to_none=True)


@contextlib.contextmanager
def isolated(trainer: Trainer) -> Iterator[None]:
    """Give the trainer no callbacks, loggers and schedules here, and progress counters of its own."""
    epoch_loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
    optimization = (epoch_loop.automatic_optimization, epoch_loop.manual_optimization)
    replaced: list[tuple[Any, str, Any]] = [
        (holder, name, copy.deepcopy(value))
        for holder in (trainer.fit_loop, epoch_loop, *optimization)
        for name, value in vars(holder).items()
        if isinstance(value, _lightning.Progress)
    ]
    replaced += [
        (trainer, "callbacks", []),
        (trainer, "loggers", [DummyLogger()] if trainer.loggers else []),
        (trainer, "limit_train_batches", 1.0),
        (trainer, "val_check_interval", 1.0),
        (trainer, "should_stop", False),
        (epoch_loop, _lightning.RESULTS, _lightning.ResultCollection(training=True)),
    ]
    if trainer.lightning_module.automatic_optimization:  # a schedule may end earlier than all trials together
        replaced.append((strategy, "lr_scheduler_configs", []))
    if isinstance(strategy, PlannedSteps):
        replaced.append((strategy.first_step, "is_paused", True))
    originals = [(holder, name, getattr(holder, name)) for holder, name, _ in replaced]
    try:
        for holder, name, value in replaced:
            setattr(holder, name, value)
        yield
    finally:
        for holder, name, value in originals:
            setattr(holder, name, value)
        _lightning.reset_logged(trainer)


class TrainingState:
    """A copy in host memory of everything that steps change: shards as shards, so a rank copies its share only."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self._numbers = Numbers(_local_tensors(module), "cpu")
        self._trainable = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self._attributes = [ObjectState(child, _is_plain) for child in module.modules()]
        self._optimizers = [_optimizer_state(optimizer) for optimizer in trainer.optimizers]
        self._schedulers = [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs]
        self._precision = copy.deepcopy(trainer.precision_plugin.state_dict())
        self._random = [(device, RandomState.take(device)) for device in replica_devices(trainer)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, as often as needed."""
        module, trainer = self._module, self._trainer
        module.zero_grad(set_to_none=True)
        reshard_units(module)
        self._numbers.restore()
        self.restore_around()
        for parameter, trainable in self._trainable:
            parameter.requires_grad_(trainable)
        for each, schedule in zip(trainer.lr_scheduler_configs, self._schedulers, strict=True):
            each.scheduler.load_state_dict(copy.deepcopy(schedule))
        for optimizer, (state, groups) in zip(trainer.optimizers, self._optimizers, strict=True):
            _restore_optimizer(optimizer, state, groups)
        trainer.precision_plugin.load_state_dict(copy.deepcopy(self._precision))

    def restore_around(self) -> None:
        """Put back what steps change around parameters, buffers and optimizers: attributes, metrics, random numbers."""
        for attributes in self._attributes:
            attributes.restore(keeps_new=True)
        for child in self._module.modules():
            if isinstance(child, Metric):
                child.reset()
        for device, numbers in self._random:
            numbers.restore(device)


def settled(
    trainer: Trainer, state: TrainingState, start: int, load: Callable[[Trainer, int], None]
) -> tuple[int, TrainingState]:
    """Let the first step of a pipeline cut the module as it has to be, before any is measured.

    Args:
        trainer: The trainer.
        state: The state before.
        start: The first number of samples.
        load: Makes the loader for a number of samples.

    Returns:
        The number of samples of which batches are to be multiples, and the state to come back to.
    """
    steps = getattr(trainer.strategy, "steps", None)
    if not isinstance(steps, SettlesCut):
        return 1, state
    unit = steps.batch_unit
    with isolated(trainer):
        with steps.settling.settled():
            load(trainer, -(-start // unit) * unit)
            run_steps(trainer, 1)
        _lightning.drop_loaders(trainer)
    state.restore_around()
    is_in_parts = isinstance(getattr(trainer.strategy, "steps", None), SettlesCut)
    return unit if is_in_parts else 1, TrainingState(trainer)


def _is_plain(name: str, value: Any) -> bool:
    return not name.startswith("_") and type(value) in (bool, int, float, str, type(None), *CONTAINERS)


def _local_tensors(module: nn.Module) -> list[Tensor]:
    reshard_units(module)
    tensors = [*module.parameters(), *module.buffers()]
    return [local_of(tensor).detach() for tensor in tensors]


def _optimizer_state(optimizer: Optimizer) -> tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]]:
    """State on the host, with the device it came from, and groups without parameters."""
    state = {
        parameter: {
            name: (value.device, value.detach().to("cpu", copy=True)) if isinstance(value, Tensor) else (None, value)
            for name, value in entries.items()
        }
        for parameter, entries in optimizer.state.items()
    }
    groups = [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    return state, groups


def _restore_optimizer(
    optimizer: Optimizer, state: Mapping[Tensor, Mapping[str, Any]], groups: list[dict[str, Any]]
) -> None:
    optimizer.state.clear()
    for parameter, entries in state.items():
        optimizer.state[parameter] = {
            name: copy.deepcopy(value) if device is None else value.to(device, copy=True)
            for name, (device, value) in entries.items()
        }
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for name, value in saved.items():
            if isinstance(group.get(name), Tensor) and isinstance(value, Tensor):
                group[name].copy_(value)  # schedules keep this tensor
            else:
                group[name] = copy.deepcopy(value)
