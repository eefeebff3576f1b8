"""Plan of a pipeline's stages, made before anything is cut: the layers, parameters and ranks that belong together."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure
from lightning_parallel.techniques.pipeline.placement import (
    Placement,
    placed_by_registration,
    placement_in_turns,
    plan_stages,
)
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy, stack_length_violations
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan


@dataclass(frozen=True)
class PipelinePlan:
    """Plan for cutting the layers of a module.

    Args:
        policy: The rules by which it is cut.
        stages: The layers of each stage, and its rank.
        placement: The order of layers, where in a step each parameter is used, and costs, if they are known.
        numel: For each stage, the number of elements of its parameters.
    """

    policy: PipelinePolicy
    stages: StagePlan
    placement: Placement
    numel: tuple[int, ...]

    def local(self, structure: ModuleStructure, rank: int) -> ModuleStructure:
        """Describe the part of `structure` on one rank of the pipeline: for each of its stages, a part of each stack.

        Modules outside of the layers are no units, because a step may be left while they run.

        Args:
            structure: The layer stacks of the whole module.
            rank: The rank on the pipeline axis.
        """
        parts = []
        for stage in self.stages.stages_of(rank):
            own = [self.placement.layers[i] for i in self.stages.layers_of(stage)]
            of_stacks = [tuple(layer for layer in own if layer in stack.layers) for stack in structure.stacks]
            pairs = zip(structure.stacks, of_stacks, strict=True)
            parts += [replace(stack, layers=layers) for stack, layers in pairs if layers]
        return replace(structure, stacks=tuple(parts), large=())

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
        structure: Its layer stacks. Each takes what the one before it has returned, or is called after it.
        policy: The rules.
        num_ranks: Ranks that share the layers.
        placement: The result of tracing a step; by default, the order of registration decides.
        takes_turns: Whether stages take turns, where there is no such result.
    """
    if placement is None:
        placed = placement_in_turns if takes_turns else placed_by_registration
        placement = placed(module, structure.layers)
    stages = plan_stages(module, placement, policy, num_ranks)
    numel = [0] * stages.num_stages
    for name, parameter in module.named_parameters():
        for stage in {stages.stage_at(position) for position in placement.positions[name]}:
            numel[stage] += parameter.numel()
    return PipelinePlan(policy, stages, placement, tuple(numel))


def cut_violations(structure: ModuleStructure, policy: PipelinePolicy, num_ranks: int) -> list[str]:
    """Reasons why layers cannot be cut into stages over `num_ranks` ranks; empty if they can.

    Args:
        structure: The layer stacks of a module.
        policy: The rules.
        num_ranks: Ranks that share the layers.
    """
    paths = [stack.path for stack in structure.stacks]
    return stack_length_violations(policy, num_ranks, len(structure.layers), paths)


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
