"""A strategy as far as the comparison of its first step reads it, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_parallel.module.differences import Tolerance
from lightning_parallel.module.short_stacks import ShortStacks, parameter_bytes, short_stacks
from lightning_parallel.plan import Plan
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.memory import free_memory
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.step_hooks import StepHooks

_COPIES = 3
"""Number of times that parameters are held for the comparison: the copy, its gradients, and those of one microstep."""
_TF32 = 2.0**-10


class ComparedStrategy(Protocol):
    """A strategy of this package, as far as the comparison reads it."""

    precision_plugin: Any

    @property
    def module(self) -> LightningModule:
        """The user's module."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """The module's optimizers."""

    @property
    def steps(self) -> StepHooks:
        """The calls around its steps."""

    @property
    def degrees(self) -> Degrees:
        """The resolved degrees."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""

    @property
    def replica_devices(self) -> list[torch.device]:
        """The devices of this process."""

    @property
    def num_processes(self) -> int:
        """Processes on this machine."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def global_rank(self) -> int:
        """This rank."""

    @property
    def updates_in_backward(self) -> bool:
        """Whether parameters are updated while backward runs."""

    @property
    def can_leave_out_layers(self) -> bool:
        """Whether a step may go through some of the layers only, the same ones on all ranks."""

    def plan_for(self, module: LightningModule) -> Plan:
        """The plan of `module`."""

    def policies_for(self, module: LightningModule) -> Policies:
        """The rules, with those that depend on `module`."""

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Called before a backward through `closure_loss`."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Called after a backward through `closure_loss`."""

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, have decided so. A collective."""


def tolerance_of(strategy: ComparedStrategy) -> Tolerance:
    """The distance that a step under `strategy` may have from one process: what the coarsest dtype in it allows."""
    policies = strategy.policies_for(strategy.module)
    if policies.layer.float8 not in (None, "none"):
        return Tolerance(torch.finfo(torch.float8_e4m3fn).eps)
    dtypes = {parameter.dtype for parameter in strategy.module.parameters() if parameter.is_floating_point()}
    sharding = policies.sharding_dtypes.fsdp
    dtypes |= {dtype for dtype in (sharding.param_dtype, sharding.reduce_dtype) if dtype is not None}
    name = str(strategy.precision_plugin.precision)
    if name.endswith("-mixed"):
        dtypes.add(torch.bfloat16 if name.startswith("bf16") else torch.float16)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    is_tf32 = strategy.root_device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return Tolerance(max(eps, _TF32) if is_tf32 else eps)


def is_reference(strategy: ComparedStrategy) -> bool:
    """Whether nothing is done to the module, so that the step is that of one process by itself."""
    is_one = strategy.world_size == 1 and len(strategy.replica_devices) == 1
    return is_one and not strategy.policies_for(strategy.module).layer.are_on


def unsupported(strategy: ComparedStrategy) -> str:
    """The reason for which a first step under `strategy` is not compared, whatever memory there is; empty if it is."""
    if strategy.updates_in_backward:
        return "optimizer_in_backward=True uses up each gradient as soon as it is there"
    return ""


def shortened(strategy: ComparedStrategy) -> tuple[ShortStacks | None, str]:
    """The layers without which a copy of the module fits beside it on all ranks. A collective.

    Call it before anything is applied to the module.

    Returns:
        ``None`` if it fits with all of them; and the reason for which it cannot be compared, empty if it can.
    """
    module, room = strategy.module, _room(strategy) // _COPIES
    if parameter_bytes(module) <= room:
        return None, ""
    leaves_out = strategy.can_leave_out_layers and module.automatic_optimization
    short = short_stacks(module, strategy.plan_for(module).structure, room) if leaves_out else None
    return short, "" if short is not None else _TOO_LARGE


def has_room(strategy: ComparedStrategy) -> bool:
    """Whether a copy of the module, without gradients, fits beside it on all ranks. A collective."""
    return parameter_bytes(strategy.module) <= _room(strategy)


def _room(strategy: ComparedStrategy) -> int:
    """Half of the bytes that are free, on the rank with the fewest. A collective."""
    device = strategy.root_device
    sharers = strategy.num_processes if device.type == "cpu" else 1
    free: list[int] = of_all_ranks(free_memory(device))
    return min(free) // max(1, sharers) // 2


_TOO_LARGE = "the module does not fit on a rank beside itself; check='first_step' tries nevertheless"


def shares_samples(strategy: ComparedStrategy) -> bool:
    """Whether several ranks compute the same samples together."""
    degrees = strategy.degrees
    return any(degree != 1 for degree in (degrees.context, degrees.tensor, degrees.pipeline))


def layers_with_parts(strategy: ComparedStrategy) -> tuple[str, ...]:
    """Paths of the layers inside of which ranks have parts of values. Call it before anything is applied."""
    degrees = strategy.degrees
    if degrees.context == 1 and degrees.tensor == 1:
        return ()
    return strategy.plan_for(strategy.module).structure.layers


def in_words(strategy: ComparedStrategy, differences: Sequence[str], rank: int, where: str) -> str:
    """The message of the error that ends a fit.

    Args:
        strategy: The strategy.
        differences: What differs.
        rank: The rank that has found it.
        where: From which module on the steps differ; empty if nobody knows.
    """
    degrees = (f"{each.name}={getattr(strategy.degrees, each.name)}" for each in fields(strategy.degrees))
    given = ", ".join(each for each in degrees if not each.endswith("=1"))
    finder = "" if rank == 0 else f", as rank {rank} found"
    begins = f". In a second run, {where}" if where else ""
    is_cut = strategy.degrees.pipeline != 1 and not strategy.policies_for(strategy.module).takes_turns
    turns = "schedule='turns', with which stages run whole batches, or " if is_cut else ""
    return (
        f"the first step under {type(strategy).__name__}({given}) is not that of one process{finder}: "
        f"{'; '.join(differences)}{begins}. Nothing was updated. The step does something that this strategy does not "
        f"see through, or the strategy is wrong: please report it then. Give {turns}another strategy, change that part "
        "of the step, or give check='off' to train with other numbers than one process"
    )
