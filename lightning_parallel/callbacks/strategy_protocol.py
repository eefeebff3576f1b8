"""Properties of a strategy that callbacks read, with defaults for strategies of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.strategies import DDPStrategy

from lightning_parallel.errors import check
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.techniques.recompute import Recompute, parse_recompute

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel.techniques.pipeline.settling import Settling


class Pausable(Protocol):
    """A comparison of steps that can be paused."""

    is_paused: bool
    around_plain: Callable[[], AbstractContextManager[object]]
    """Makes a context for each step of a plain copy of the whole module."""


@runtime_checkable
class PlannedSteps(Protocol):
    """A strategy of this package."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated while backward still runs, before any step of an optimizer."""

    @property
    def cuts_batches(self) -> bool:
        """Whether the batch of a rank runs in parts."""

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""

    @property
    def replica_devices(self) -> list[torch.device]:
        """Devices of this process; where there are several, each batch is split over copies of the module on them."""

    @property
    def first_step(self) -> Pausable:
        """The comparison of the first step with one process."""

    def refuse(self, violations: list[str]) -> None:
        """Raise with all `violations`, in words on rank 0 only."""


@runtime_checkable
class PlansModules(Protocol):
    """A strategy of this package, once the devices are known."""

    @property
    def degrees(self) -> Degrees:
        """The resolved degrees."""

    def policies_for(self, module: LightningModule) -> Policies:
        """The rules, with those that depend on `module`."""


@runtime_checkable
class WritesParts(Protocol):
    """A strategy whose checkpoints may have the tensors of each rank."""

    @property
    def writes_parts(self) -> bool:
        """Whether the checkpoint that is being made is one."""


@runtime_checkable
class MeetsForBatches(Protocol):
    """A strategy that ends epochs on all ranks together."""

    @property
    def meets_for_batches(self) -> bool:
        """Whether ranks wait for each other before each batch of training."""


@runtime_checkable
class DrawsInSteps(Protocol):
    """A strategy whose steps draw from a stream of their own."""

    @property
    def state_of_steps(self) -> RandomState | None:
        """The state from which the next step draws; ``None`` where it is that of hooks and loaders."""


@runtime_checkable
class WeighsParts(Protocol):
    """The calls around the steps of a strategy that cuts batches."""

    microbatch_weights: Any
    """Counts the tokens of a part, for its weight; ``None`` where all have the same."""


@runtime_checkable
class SettlesCut(Protocol):
    """The calls around the steps of a strategy whose first training step may cut the module otherwise."""

    settling: Settling

    @property
    def batch_unit(self) -> int:
        """The number of samples of which batches are to be multiples, so that all have as many parts."""


def refuse(trainer: Trainer, violations: Sequence[str]) -> None:
    """Raise a ConfigurationError with all `violations`, in words on rank 0 only where the strategy can do that.

    Args:
        trainer: The trainer, which has the strategy.
        violations: Reasons; nothing happens without any.
    """
    strategy = trainer.strategy
    strategy.refuse(list(violations)) if isinstance(strategy, PlannedSteps) else check(violations)


def updates_in_backward(trainer: Trainer) -> bool:
    """Whether the strategy updates parameters while backward still runs, before any step of an optimizer."""
    strategy = trainer.strategy
    return isinstance(strategy, PlannedSteps) and strategy.updates_in_backward


def cuts_batches(trainer: Trainer) -> bool:
    """Whether the batch of a rank runs in parts."""
    strategy = trainer.strategy
    return isinstance(strategy, PlannedSteps) and strategy.cuts_batches


def cuts_stack(trainer: Trainer) -> bool:
    """Whether ranks have other layers than others, and wait for each other within a step."""
    strategy = trainer.strategy
    return isinstance(strategy, PlansModules) and strategy.degrees.pipeline != 1


def weigh_parts(trainer: Trainer, weights: Any) -> None:
    """Let losses of the parts of a batch be weighted; ``None`` ends it.

    Args:
        trainer: The trainer, whose strategy cuts batches.
        weights: What counts the tokens of a part.
    """
    steps = getattr(trainer.strategy, "steps", None)
    if isinstance(steps, WeighsParts):
        steps.microbatch_weights = weights


def replica_devices(trainer: Trainer) -> list[torch.device]:
    """Devices of this process; where there are several, each batch is split over copies of the module on them."""
    strategy = trainer.strategy
    return strategy.replica_devices if isinstance(strategy, PlannedSteps) else [strategy.root_device]


def num_local_processes(trainer: Trainer) -> int:
    """Processes on this machine."""
    strategy = trainer.strategy
    return max(1, strategy.num_processes) if isinstance(strategy, PlannedSteps) else 1


def writes_parts(strategy: object) -> bool:
    """Whether the checkpoint that `strategy` is making has the tensors of each rank."""
    return isinstance(strategy, WritesParts) and strategy.writes_parts


def state_of_steps(trainer: Trainer) -> RandomState | None:
    """The state of generators from which the next step draws; ``None`` where it is that of hooks and loaders."""
    strategy = trainer.strategy
    return strategy.state_of_steps if isinstance(strategy, DrawsInSteps) else None


def splits_layers(trainer: Trainer) -> bool:
    """Whether ranks have parts of each layer, and the whole of what is around the layers."""
    strategy = trainer.strategy
    return isinstance(strategy, PlansModules) and (strategy.degrees.context != 1 or strategy.degrees.tensor != 1)


def waiting_phases(trainer: Trainer) -> frozenset[str] | None:
    """Phases of a step in which ranks wait for each other; ``None`` where stages of a pipeline differ by nature.

    Where each rank has the whole module, that is backward, which reduces gradients. Elsewhere a microstep may have no
    collective, and Lightning lets all ranks wait for rank 0 before each batch, in ``other``.
    """
    strategy = trainer.strategy
    if cuts_stack(trainer):
        return None
    waiting = {"backward", "checkpoint"}
    if not has_whole_replicas(trainer):
        waiting |= {"forward", "other"}
    if isinstance(strategy, MeetsForBatches) and strategy.meets_for_batches:
        waiting.add("data")
    return frozenset(waiting)


def has_whole_replicas(trainer: Trainer) -> bool:
    """Whether each rank has the whole module, and computes without the others up to backward."""
    strategy = trainer.strategy
    if not isinstance(strategy, PlansModules):
        return isinstance(strategy, DDPStrategy)
    degrees = strategy.degrees
    return (degrees.shard, degrees.context, degrees.tensor, degrees.pipeline) == (1, 1, 1, 1)


def recompute_of(trainer: Trainer) -> Recompute:
    """The rule of the strategy for activations that backward computes again; the module may have its own."""
    strategy = trainer.strategy
    if not isinstance(strategy, PlansModules):
        return Recompute("none")
    return parse_recompute(strategy.policies_for(trainer.lightning_module).layer.recompute) or Recompute("none")
