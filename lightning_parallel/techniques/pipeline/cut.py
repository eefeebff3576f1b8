"""Cutting of a module's layers into the stages of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from lightning_parallel import _torch
from lightning_parallel.module.layer_logs import LayerLogs
from lightning_parallel.module.layer_stacks import ModuleStructure
from lightning_parallel.module.left_values import LeftValues
from lightning_parallel.ranks.stage_owners import StageOwners, tag_owners
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter, apply_layer_router
from lightning_parallel.techniques.pipeline.outside_calls import OutsideCalls
from lightning_parallel.techniques.pipeline.placement import hold, release
from lightning_parallel.techniques.pipeline.plan import PipelinePlan
from lightning_parallel.techniques.pipeline.turns import Turns


@dataclass(frozen=True)
class CutStack:
    """A stack of which each rank has some stages.

    Args:
        plan: The stages, and the placement of parameters.
        router: Receives each call of a layer, and runs it, skips it or ends the stage.
        owners_by_name: Which ranks hold each parameter and buffer.
        group: The ranks that share the stack.
        host_group: The same, for host memory.
        turns: Runs each call of a layer where stages take turns; ``None`` where they run by a schedule.
    """

    plan: PipelinePlan
    router: LayerRouter
    owners_by_name: dict[str, StageOwners]
    group: ProcessGroup
    host_group: ProcessGroup
    turns: Turns | None = None

    def local(self, structure: ModuleStructure) -> ModuleStructure:
        """The part of `structure` on this rank."""
        return self.plan.local(structure, self.group.rank())

    def ranks_of(self, name: str) -> tuple[int, ...]:
        """Ranks of the pipeline that hold a parameter, buffer or attribute; none for one that is new outside of layers.

        Args:
            name: Its name, which a hook may have added since the cut.
        """
        if name in self.owners_by_name:
            return tuple(self.owners_by_name[name].ranks)
        stages = self.plan.stages
        inside = [at for at, path in enumerate(self.plan.placement.layers) if name.startswith(f"{path}.")]
        return tuple(dict.fromkeys(stages.rank_of(stages.stage_at(at)) for at in inside))

    def release(self, module: nn.Module, device: torch.device) -> None:
        """Replace parameters of other stages by placeholders, in place.

        Args:
            module: The whole module.
            device: The device that placeholders report.
        """
        release(module, self.owners_by_name, device)

    def is_in_schedule(self) -> bool:
        """Whether stages run parts of a step at the moment, in the order of a schedule, or backward of one."""
        # Backward calls again what the user has checkpointed outside of the layers, on its own stage only.
        return self.router.is_open or _torch.autograd.is_in_backward()

    def tag(self, module: nn.Module) -> None:
        """Tag the parameters with their owners, so that norms and checkpoints are those of the whole module."""
        tag_owners(module, self.owners_by_name)


def cut_stack(
    module: nn.Module,
    plan: PipelinePlan | None,
    *,
    group: ProcessGroup | None,
    host_group: ProcessGroup | None,
) -> CutStack | None:
    """Let the layers of the whole `module` be called through a `LayerRouter`. No collective.

    Args:
        module: The whole module; changed in place, but it holds all parameters until `CutStack.release`.
        plan: The plan of its stages; with ``None``, nothing is cut.
        group: The ranks that share the stack.
        host_group: The same, for host memory.

    Returns:
        The stack that was cut, or ``None`` without a plan.
    """
    if plan is None:
        return None
    assert group is not None
    assert host_group is not None
    layers = [(path, module.get_submodule(path)) for path in plan.placement.layers]
    left_values = LeftValues(module, plan.placement.layers)
    router = apply_layer_router(
        layers, plan.stages, rank=group.rank(), left_values=left_values, known=plan.placement.known
    )
    owners_by_name = hold(module, plan.placement.positions, plan.stages, group=group, host_group=host_group)
    turns = Turns(plan.stages, plan.placement.layers, left_values, LayerLogs(module), group, host_group)
    if plan.placement.takes_turns:
        router.outside = turns.call
        return CutStack(plan, router, owners_by_name, group, host_group, turns)
    cut = CutStack(plan, router, owners_by_name, group, host_group)
    outside = OutsideCalls(turns, cut.is_in_schedule, group, host_group)
    outside.apply(module)
    router.outside = outside.call
    return cut
