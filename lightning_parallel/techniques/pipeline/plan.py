"""Plan of a pipeline's stages, made before anything is cut: the layers, parameters and ranks that belong together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure, Stack
from lightning_parallel.techniques.pipeline.placement import (
    Placement,
    placement_in_turns,
    plan_stages,
    positions_by_registration,
)
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy, stack_length_violations
from lightning_parallel.techniques.pipeline.shape_inference import collecting_hooks
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan


@dataclass(frozen=True)
class PipelinePlan:
    """Plan for cutting the one stack of a module.

    Args:
        policy: The rules by which it is cut.
        stages: The layers of each stage, and its rank.
        placement: Where in a step each parameter is used, and the costs of layers, if they are known.
        numel: For each stage, the number of elements of its parameters.
    """

    policy: PipelinePolicy
    stages: StagePlan
    placement: Placement
    numel: tuple[int, ...]

    def local(self, structure: ModuleStructure, rank: int) -> ModuleStructure:
        """Describe the part of `structure` on one rank of the pipeline: a stack for each of its stages.

        Modules outside of the stack are no units, because a step may be left while they run.

        Args:
            structure: The layer stacks of the whole module.
            rank: The rank on the pipeline axis.
        """
        (stack,) = structure.stacks
        layers = [self.stages.layers_of(stage) for stage in self.stages.stages_of(rank)]
        stages = tuple(replace(stack, layers=tuple(stack.layers[i] for i in indices)) for indices in layers)
        return replace(structure, stacks=stages, large=())

    def absent(self, rank: int) -> frozenset[str]:
        """Names of the parameters and buffers that a rank of the pipeline does not hold."""
        positions = self.placement.positions
        return frozenset(name for name, where in positions.items() if rank not in self.stages.ranks_at(where))


def plan_pipeline(
    module: nn.Module,
    structure: ModuleStructure,
    policy: PipelinePolicy,
    num_ranks: int,
    placement: Placement | None = None,
    *,
    takes_turns: bool = False,
) -> PipelinePlan:
    """Plan the stages of `module`, which is not changed.

    Args:
        module: The whole module.
        structure: Its layer stacks, of which there is one.
        policy: The rules.
        num_ranks: Ranks that share the stack.
        placement: The result of tracing a step; by default, the order of registration decides.
        takes_turns: Whether stages take turns, where there is no such result.
    """
    if placement is None and takes_turns:
        placement = placement_in_turns(module, structure)
    placement = placement or Placement(positions_by_registration(module, structure))
    stages = plan_stages(module, structure, placement, policy, num_ranks)
    numel = [0] * stages.num_stages
    for name, parameter in module.named_parameters():
        for stage in {stages.stage_at(position) for position in placement.positions[name]}:
            numel[stage] += parameter.numel()
    return PipelinePlan(policy, stages, placement, tuple(numel))


def cut_violations(module: nn.Module, structure: ModuleStructure, policy: PipelinePolicy, num_ranks: int) -> list[str]:
    """Reasons why the layers of `module` cannot be cut into stages over `num_ranks` ranks; empty if they can.

    Args:
        module: The whole module.
        structure: Its layer stacks.
        policy: The rules.
        num_ranks: Ranks that share the stack.
    """
    if len(structure.stacks) == 1:
        stack = structure.stacks[0]
        return stack_length_violations(policy, num_ranks, len(stack.layers), stack.path)
    long = [s for s in structure.stacks if not stack_length_violations(policy, num_ranks, len(s.layers), s.path)]
    # One that trains, the longest, and of equal ones the last: what a decoder is given of an encoder passes on.
    longest = max(reversed(long), key=lambda stack: (_trains(module, stack), len(stack.layers)), default=None)
    stacks = ", ".join(f"{stack.path} ({len(stack.layers)} layers)" for stack in structure.stacks)
    start = f"pipeline={num_ranks} cuts one stack of layers, and {type(module).__name__} has {len(structure.stacks)}: "
    if longest is None:
        most = max(len(stack.layers) for stack in structure.stacks) // policy.stages_per_rank
        return [f"{start}{stacks}. None has a layer for each stage; give pipeline={most or 1} or less"]
    return [
        f"{start}{stacks}. Name the one to cut, such as layers={longest.path}: the others stay whole on the stage that "
        "calls them, and what they return passes from stage to stage; or give pipeline=1"
    ]


def _trains(module: nn.Module, stack: Stack) -> bool:
    parameters = (p for layer in stack.layers for p in module.get_submodule(layer).parameters())
    return any(parameter.requires_grad for parameter in parameters)


def sharing_violations(module: nn.Module, structure: ModuleStructure) -> list[str]:
    """Reasons why stages cannot take turns: a layer shares a parameter with what is outside of the layers.

    Its gradient would be the sum of what its stage has computed inside, and what every rank has computed outside.

    Args:
        module: The whole module.
        structure: Its layer stacks.
    """
    inside = {p: name for path in structure.layers for name, p in module.get_submodule(path).named_parameters(path)}
    is_in_layer = lambda name: any(name.startswith(f"{path}.") for path in structure.layers)  # noqa: E731
    named = module.named_parameters(remove_duplicate=False)
    shared = [(name, inside[p]) for name, p in named if p in inside and not is_in_layer(name)]
    return [
        f"{name} is {of_layer}, too, and pipeline stages that take turns have a parameter in layers, or outside of "
        "them, not both; give each its own, or give pipeline=1"
        for name, of_layer in shared[:1]
    ]


def hooked_layers_violations(module: nn.Module, structure: ModuleStructure) -> list[str]:
    """Reasons why a user's forward hooks on layers are refused: those of layers on other stages would not run.

    Args:
        module: The whole module.
        structure: Its layer stacks.
    """
    hooked = [
        path
        for path in structure.layers
        if len(module.get_submodule(path)._forward_hooks) > len(collecting_hooks(module.get_submodule(path)))
    ]
    if not hooked:
        return []
    return [
        f"{hooked[0]} has a forward hook, which under a pipeline only the ranks of its stage would run; take it off, "
        "or give pipeline=1"
    ]
