"""What a strategy would do to a module: its layers, the degrees, the stages, and where each linear map goes."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_parallel.module.layer_stacks import ModuleStructure, Stack, find_layers
from lightning_parallel.strategies.mesh import MeshStrategy
from lightning_parallel.techniques.pipeline.cut import cut_violations
from lightning_parallel.techniques.pipeline.placement import Placement, plan_stages, positions_by_registration
from lightning_parallel.techniques.pipeline.schedules import pipeline_violations
from lightning_parallel.techniques.tensor.plan import TensorPlan, plan_tensor
from lightning_parallel.techniques.tensor.trace import is_transposed, linear_maps

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel.policies import Policies
    from lightning_parallel.ranks.degrees import Degrees


def explain(trainer: Trainer, module: LightningModule) -> str:
    """What ``trainer.fit(module)`` would do, as a text; starts no process, and changes neither.

    What `configure_model` builds is built in a copy: on the meta device, where `fit` would build it there.

    Args:
        trainer: With the strategy and the number of devices.
        module: The module, before any fit.

    Example:
        >>> print(explain(Trainer(strategy="tp_custom", accelerator="cpu", devices=2), module))
    """
    strategy: Any = trainer.strategy
    module = _built(strategy, module)
    name = type(module).__name__
    if not isinstance(strategy, MeshStrategy):
        structure = find_layers(module)
        whole = f"{type(strategy).__name__} on {trainer.world_size} ranks: it has no degrees, and splits no layer"
        return "\n".join([f"{name}: {structure.explain()}", "", whole])
    policies, degrees = strategy._policies(module), strategy.degrees
    structure = find_layers(module, policies.layer.layers)
    parts = [
        f"{name}: {structure.explain()}",
        _degrees(degrees),
        *_pipeline(module, structure, policies, degrees),
        *_tensor(module, structure, policies, degrees),
        *_context(structure, policies, degrees),
    ]
    return "\n\n".join(parts)


def _built(strategy: Any, module: LightningModule) -> LightningModule:
    if not is_overridden("configure_model", module):
        return module
    module = copy.deepcopy(module)
    deferral = getattr(strategy, "_deferral", None)
    if deferral is None:  # a strategy of Lightning's
        with torch.device("meta"):
            module.configure_model()
        return module
    deferral.attach(module)
    module.configure_model()
    deferral.detach()
    return module


def _degrees(degrees: Degrees) -> str:
    sizes = {n: getattr(degrees, n) for n in ("replicate", "shard", "context", "tensor", "pipeline")}
    total = degrees.data * degrees.context * degrees.tensor * degrees.pipeline  # type: ignore[operator]
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    readers = f"{degrees.data} read different samples" if degrees.data > 1 else "all read the same samples"
    return f"{total} ranks = {product}; {readers}"


def _pipeline(module: nn.Module, structure: ModuleStructure, policies: Policies, degrees: Degrees) -> list[str]:
    """The stages, as far as the order of registration tells; a traced step may move what is outside of the stack."""
    size = int(degrees.pipeline)
    if size == 1:
        return []
    policy = policies.pipeline
    if violations := [*pipeline_violations(policy, size), *cut_violations(module, structure, policy, size)]:
        return ["\n".join([f"pipeline={size} is refused", *(f"  {violation}" for violation in violations)])]
    (stack,) = structure.stacks
    positions = positions_by_registration(module, structure)
    plan = plan_stages(module, structure, Placement(positions), policy, size)
    lines = [f"pipeline over {size} ranks, schedule {policy.schedule}, microbatches {policy.microbatches}"]
    for stage in range(plan.num_stages):
        layers = plan.layers_of(stage)
        count = sum(
            parameter.numel()
            for name, parameter in module.named_parameters()
            if any(plan.stage_at(position) == stage for position in positions[name])
        )
        ends = f"{stack.layers[layers.start]} to {stack.layers[layers.stop - 1]}"
        lines.append(f"  stage {stage} on rank {plan.rank_of(stage)} of the pipeline: {ends}, {count:,} parameters")
    lines.append("each boundary of stages: one activation and one gradient a microbatch")
    return ["\n".join(lines)]


def _context(structure: ModuleStructure, policies: Policies, degrees: Degrees) -> list[str]:
    size = int(degrees.context)
    if size == 1:
        return []
    stacks = ", ".join(stack.path for stack in structure.stacks) or "no stack, so it is refused"
    if policies.context_attention == "ring":
        sent = f"keys and values {size - 1} times forward, {size - 1} times and gradients {size} times backward"
        return [f"sequences split over {size} ranks in {stacks}: an attention sends {sent}"]
    return [f"sequences split over {size} ranks in {stacks}: an attention is four all-to-alls forward, four backward"]


def _tensor(module: nn.Module, structure: ModuleStructure, policies: Policies, degrees: Degrees) -> list[str]:
    size = degrees.tensor
    if size == 1:
        return ["tensor=1: no linear map is split"]
    plan = plan_tensor(module, structure, policies.tensor_plan, degree=size)
    if plan.violations:
        return ["\n".join([f"tensor={size} is refused", *(f"  {violation}" for violation in plan.violations)])]
    placements = [f"tensor parallel over {size} ranks, by {plan.source}"]
    collectives = ["collectives of a layer among the ranks that share it, counted by its branches"]
    for stack in structure.stacks:
        placements += _placements(module, stack, plan, int(size))
        collectives += _collectives(module, stack, plan, sequence=policies.sequence)
    placements += [_table(path, module.get_submodule(path), int(size)) for path in plan.tables]
    return ["\n".join(placements), "\n".join(collectives)]


def _placements(module: nn.Module, stack: Stack, plan: TensorPlan, size: int) -> list[str]:
    layers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for layer in stack.layers:
        for name, linear in linear_maps(module.get_submodule(layer)):
            layers[name, _placement(linear, plan.roles.get(f"{layer}.{name}", "whole"), size)].append(layer)
    return [f"  {_once(stack, paths)}.{name}: {placement}" for (name, placement), paths in layers.items()]


def _placement(linear: Any, role: str, size: int) -> str:
    """The role, the shape of the weight, and the shape of a rank's part of it."""
    if role == "heads":
        return f"heads, {linear.num_heads} -> {linear.num_heads // size}"
    if not hasattr(linear, "weight"):
        return role
    shape = list(linear.weight.shape)
    local = list(shape)
    if role != "whole":
        local[int((role == "colwise") == is_transposed(linear))] //= size
    return f"{role}, {shape}" + (f" -> {local}" if local != shape else "")


def _table(path: str, table: Any, size: int) -> str:
    """An embedding or head that is split by tokens."""
    tokens, width = table.weight.shape
    return f"  {path}: vocab, [{tokens}, {width}] -> [{tokens // size}, {width}]"


def _collectives(module: nn.Module, stack: Stack, plan: TensorPlan, *, sequence: bool) -> list[str]:
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for path in stack.layers:
        layers[_sent(module.get_submodule(path), plan.below(path), sequence=sequence)].append(path)
    return [f"  {_once(stack, paths)}: {text}" for text, paths in layers.items()]


def _sent(layer: nn.Module, roles: dict[str, str], *, sequence: bool) -> str:
    """What the branches of `layer` send: each ends with a sum over the ranks, and begins with one in backward.

    Where positions are split between branches, sums are scattered, and what a branch begins with is gathered.
    """
    branches = [name for name, role in roles.items() if role in ("rowwise", "heads")]
    if not branches:
        return "no branch is closed" if roles else "not split"
    heads = [layer.get_submodule(name) for name, role in roles.items() if role == "heads"]
    packed = sum(getattr(each, name) is not None for each in heads for name in ("in_proj_weight", "in_proj_bias"))
    number = len(branches)
    sums = f"{number} all-gathers and {number} reduce-scatters" if sequence else f"{number} all-reduces"
    gathers = f", {packed} all-gathers of packed weights" if packed else ""
    scatters = f", {packed} reduce-scatters of packed weights" if packed else ""
    own = ", 1 all-reduce of parameters that every rank has whole" if sequence else ""
    return f"forward {sums} ({', '.join(branches)}){gathers}; backward {sums}{scatters}{own}"


def _once(stack: Stack, layers: list[str]) -> str:
    """One path for layers of a stack: with ``*`` if these are all."""
    if len(layers) == len(stack.layers):
        return f"{stack.path}.*"
    return f"{stack.path}.[{', '.join(layer.removeprefix(f'{stack.path}.') for layer in layers)}]"
