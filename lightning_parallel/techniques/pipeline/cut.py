"""Cut the stack of a module into stages: who holds what, and the way of a step through it. Layer 2."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_parallel.module.layer_stacks import ModuleStructure
from lightning_parallel.ranks.stage_owners import StageOwners, tag_owners
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter, apply_layer_router
from lightning_parallel.techniques.pipeline.placement import (
    Placement,
    hold,
    plan_stages,
    positions_by_registration,
    release,
)
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy, stack_length_violations
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan


@dataclass(frozen=True)
class CutStack:
    """A stack of which each rank has some stages.

    Args:
        policy: How it was cut.
        plan: Which layers are which stage, and where.
        router: Where each call of a layer goes.
        placement: Where in a step each parameter is used, and what layers take, if that is known.
        owners_by_name: Which ranks hold each parameter and buffer for that.
        group: The ranks that share the stack.
        host_group: The same, for host memory.
    """

    policy: PipelinePolicy
    plan: StagePlan
    router: LayerRouter
    placement: Placement
    owners_by_name: dict[str, StageOwners]
    group: ProcessGroup
    host_group: ProcessGroup

    def local(self, structure: ModuleStructure) -> ModuleStructure:
        """What of `structure` is on this rank: a stack for each of its stages, between which others compute.

        Outside of the stack nothing is a unit: a step is left in the middle.
        """
        (stack,) = structure.stacks
        layers = [self.plan.layers_of(stage) for stage in self.plan.stages_of(self.group.rank())]
        stages = tuple(replace(stack, layers=tuple(stack.layers[i] for i in indices)) for indices in layers)
        return replace(structure, stacks=stages, large=())

    def release(self, module: nn.Module, device: torch.device) -> None:
        """Give up, in place, what other stages hold."""
        release(module, self.owners_by_name, device)

    def mark(self, module: nn.Module) -> None:
        """Note on the parameters who holds them, so that norms and checkpoints are those of the whole."""
        tag_owners(module, self.owners_by_name)


def cut_violations(
    module: nn.Module, structure: ModuleStructure, policy: PipelinePolicy | None, num_ranks: int
) -> list[str]:
    """Why the layers of `module` cannot be cut into stages over `num_ranks` ranks; empty if they can."""
    if policy is None or num_ranks == 1:
        return []
    if len(structure.stacks) == 1:
        stack = structure.stacks[0]
        return stack_length_violations(policy, num_ranks, len(stack.layers), stack.path)
    paths = ", ".join(stack.path for stack in structure.stacks)
    return [
        f"pipeline={num_ranks} cuts one stack of layers, and {type(module).__name__} has {len(structure.stacks)}: "
        f"{paths}. Name the one to cut with layers=, such as a decoder's: the others stay whole on the stage that "
        "calls them, and what they return passes from stage to stage; or give pipeline=1"
    ]


def cut_stack(
    module: nn.Module,
    structure: ModuleStructure,
    policy: PipelinePolicy,
    *,
    group: ProcessGroup | None,
    host_group: ProcessGroup | None,
    placement: Placement | None = None,
) -> CutStack | None:
    """Plan the stages of the whole `module`, and let its layers be called through a `LayerRouter`. No collective.

    Args:
        module: The whole module; changed in place, but it holds all parameters until `CutStack.release`.
        structure: Its one stack.
        policy: How to cut.
        group: The ranks that share the stack; with ``None``, nothing is cut.
        host_group: The same, for host memory.
        placement: What a look at a step has shown; otherwise, parameters are where their registration says.
    """
    if group is None or host_group is None:
        return None
    if placement is None:
        placement = Placement(positions_by_registration(module, structure))
    plan = plan_stages(module, structure, placement, policy, group.size())
    layers = [(path, module.get_submodule(path)) for path in structure.layers]
    router = apply_layer_router(layers, plan, beside=placement.beside)
    owners_by_name = hold(module, placement.positions, plan, group=group, host_group=host_group)
    return CutStack(policy, plan, router, placement, owners_by_name, group, host_group)
