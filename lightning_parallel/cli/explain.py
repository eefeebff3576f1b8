"""The plan of a strategy for a module, in words: layers, degrees, units, stages, and the split of each linear map."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_parallel.cli.byte_sizes import in_words
from lightning_parallel.module.layer_stacks import Stack, find_layers
from lightning_parallel.strategies.planned_strategy import PlannedStrategy
from lightning_parallel.techniques.sharding import ROOT, ShardingPlan
from lightning_parallel.techniques.tensor.splits import MapSplit

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel.plan import Plan
    from lightning_parallel.policies import Policies
    from lightning_parallel.ranks.degrees import Degrees

_SEEN_LATER = "as the first step will show, which gives layers what could not be guessed"
_MOST_WHOLE = 8
"""Parameters that stay whole are named up to this number."""


def explain(trainer: Trainer, module: LightningModule) -> str:
    """Describe what ``trainer.fit(module)`` would do; starts no process, and changes neither.

    `configure_model` runs on a copy of the module: on the meta device, if `fit` would run it there.

    Args:
        trainer: With the strategy and the number of devices.
        module: The module, before any fit.

    Example:
        >>> print(explain(Trainer(strategy="tp_custom", accelerator="cpu", devices=2), module))
    """
    strategy: Any = trainer.strategy
    module = _built(strategy, module)
    name = type(module).__name__
    plan = strategy.plan_for(module) if isinstance(strategy, PlannedStrategy) else None
    if plan is None or not plan.policies.shards:
        structure = find_layers(module) if plan is None else plan.structure
        whole = f"{type(strategy).__name__} on {trainer.world_size} ranks: it has no degrees, and splits no layer"
        return "\n".join([f"{name}: {structure.explain()}", "", whole])
    return describe_plan(plan)


def describe_plan(plan: Plan) -> str:
    """A text for people, a paragraph for each part of the plan."""
    parts = [
        [f"{plan.module}: {plan.structure.explain()}"],
        [degrees_in_words(plan.degrees)],
        _sharding(plan),
        _pipeline(plan),
        *_tensor(plan),
        _context(plan),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def _built(strategy: Any, module: LightningModule) -> LightningModule:
    if not is_overridden("configure_model", module):
        return module
    module = copy.deepcopy(module)
    deferral = getattr(strategy, "_deferral", None)
    if deferral is None:  # a strategy of Lightning's
        with torch.device("meta"):
            module.configure_model()
        return module
    deferral.attach(module, to_meta=strategy.defers_init)
    module.configure_model()
    deferral.detach()
    return module


def degrees_in_words(degrees: Degrees) -> str:
    """One line: the number of ranks, the degrees, and how many ranks read different samples.

    Args:
        degrees: Resolved.
    """
    sizes = {n: getattr(degrees, n) for n in ("replicate", "shard", "context", "tensor", "pipeline")}
    total = degrees.data * degrees.context * degrees.tensor * degrees.pipeline  # type: ignore[operator]
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    readers = f"{degrees.data} read different samples" if degrees.data > 1 else "all read the same samples"
    return f"{total} ranks = {product}; {readers}"


def _sharding(plan: Plan) -> list[str]:
    """The units of FSDP2; without a pipeline they are the same on all ranks."""
    num_sharers = int(plan.degrees.shard) * int(plan.degrees.context)
    copies = f", in {plan.degrees.replicate} copies," if int(plan.degrees.replicate) > 1 else ""
    lines = []
    for rank, sharding in enumerate(plan.sharding):
        where = f" on rank {rank} of the pipeline" if len(plan.sharding) > 1 else ""
        if not sharding.units:
            lines.append(f"not sharded{where}: no other rank shares a parameter")
            continue
        units = ", ".join(_collapsed(plan, sharding.units))
        lines.append(f"sharded over {num_sharers} ranks{copies}{where} in {len(sharding.units)} units: {units}")
        if plan.degrees.tensor == 1:
            lines.append(_memory(sharding, num_sharers, plan.policies))
        lines += [f"  whole: {name} ({reason})" for name, reason in list(sharding.whole.items())[:_MOST_WHOLE]]
        if (more := len(sharding.whole) - _MOST_WHOLE) > 0:
            lines.append(f"  whole: {more} more")
    return lines


def _memory(sharding: ShardingPlan, num_sharers: int, policies: Policies) -> str:
    """The share of a rank, where tensor parallelism does not split parameters before."""
    total, dtype = sum(sharding.num_bytes), policies.sharding_dtypes.fsdp.param_dtype
    # Mixed precision gathers parameters in another dtype than that in which they are kept.
    sizes = sharding.num_bytes if dtype is None else tuple(numel * dtype.itemsize for numel in sharding.numel)
    unit = sharding.units[sizes.index(max(sizes))] or "the rest"
    gathered = f"the largest unit has {in_words(max(sizes))} when it is gathered ({unit})"
    if policies.reshard == "never":
        gathered = f"from forward to backward all are gathered, {in_words(sum(sizes))}"
    return (
        f"  a rank keeps {in_words(total / num_sharers)} of {in_words(total)} of parameters, as much of gradients, "
        f"and twice that of moments of AdamW; {gathered}"
    )


def _collapsed(plan: Plan, units: Sequence[str]) -> list[str]:
    """Paths of units, those of one stack as one."""
    found = []
    for stack in plan.structure.stacks:
        if layers := [layer for layer in stack.layers if layer in units]:
            found.append(_once(stack, layers))
    inside = {layer for stack in plan.structure.stacks for layer in stack.layers}
    found += [path for path in units if path != ROOT and path not in inside]
    return [*found, *(["the rest with the module itself"] if ROOT in units else [])]


def _pipeline(plan: Plan) -> list[str]:
    """The stages, as far as the order of registration tells; a traced step may move what is outside of the stack."""
    size = int(plan.degrees.pipeline)
    if size == 1:
        return []
    if plan.pipeline is None:
        of_tensor = plan.tensor.violations if plan.tensor is not None else []
        reasons = [violation for violation in plan.violations if violation not in of_tensor]
        return [f"pipeline={size} is refused", *(f"  {reason}" for reason in reasons)]
    paths = plan.pipeline.placement.layers
    policy, stages = plan.policies.pipeline, plan.pipeline.stages
    lines = [f"pipeline over {size} ranks, schedule {policy.schedule}, microbatches {policy.microbatches}"]
    for stage, numel in enumerate(plan.pipeline.numel):
        layers = stages.layers_of(stage)
        ends = f"{paths[layers.start]} to {paths[layers.stop - 1]}"
        lines.append(f"  stage {stage} on rank {stages.rank_of(stage)} of the pipeline: {ends}, {numel:,} parameters")
    return [*lines, "each boundary of stages: one activation and one gradient a microbatch"]


def _context(plan: Plan) -> list[str]:
    size = int(plan.degrees.context)
    if size == 1:
        return []
    stacks = ", ".join(stack.path for stack in plan.structure.stacks) or "no stack, so it is refused"
    if plan.policies.context_attention == "ring":
        sent = f"keys and values {size - 1} times forward, {size - 1} times and gradients {size} times backward"
        return [f"sequences split over {size} ranks in {stacks}: an attention sends {sent}"]
    return [f"sequences split over {size} ranks in {stacks}: an attention is four all-to-alls forward, four backward"]


def _tensor(plan: Plan) -> list[list[str]]:
    size = plan.degrees.tensor
    if size == 1:
        return [["tensor=1: no linear map is split"]]
    if plan.tensor is None or plan.tensor.violations:
        reasons = plan.violations if plan.tensor is None else plan.tensor.violations
        return [[f"tensor={size} is refused", *(f"  {reason}" for reason in reasons)]]
    if plan.tensor.unseen:
        return [
            [f"tensor parallel over {size} ranks, {_SEEN_LATER}", *(f"  {each.reason}" for each in plan.tensor.unseen)]
        ]
    splits = plan.tensor.splits
    placements = [f"tensor parallel over {size} ranks, by {plan.tensor.source}"]
    collectives = ["collectives of a layer among the ranks that share it, counted by its branches"]
    for stack in plan.structure.stacks:
        inside = [split for split in splits if split.layer in stack.layers]
        placements += _placements(stack, inside)
        collectives += _collectives(stack, inside, sequence=plan.policies.sequence)
    placements += [f"  {split.name}: {split}" for split in splits if not split.layer]
    return [placements, collectives]


def _placements(stack: Stack, splits: Sequence[MapSplit]) -> list[str]:
    layers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for split in splits:
        layers[split.name, str(split)].append(split.layer)
    return [f"  {_once(stack, paths)}.{name}: {placement}" for (name, placement), paths in layers.items()]


def _collectives(stack: Stack, splits: Sequence[MapSplit], *, sequence: bool) -> list[str]:
    layers: defaultdict[str, list[str]] = defaultdict(list)
    for path in stack.layers:
        own = [split for split in splits if split.layer == path and split.role != "whole"]
        layers[_sent(own, sequence=sequence)].append(path)
    return [f"  {_once(stack, paths)}: {text}" for text, paths in layers.items()]


def _sent(splits: Sequence[MapSplit], *, sequence: bool) -> str:
    """Count the collectives of a layer's branches: a sum over the ranks at the end of each, in backward at its start.

    Where positions are split between branches, sums are scattered and inputs of branches are gathered.
    """
    branches = [split.name for split in splits if split.closes_branch]
    if not branches:
        return "no branch is closed" if splits else "not split"
    packed = sum(split.packed for split in splits)
    number = len(branches)
    sums = f"{number} all-gathers and {number} reduce-scatters" if sequence else f"{number} all-reduces"
    gathers = f", {packed} all-gathers of packed weights" if packed else ""
    scatters = f", {packed} reduce-scatters of packed weights" if packed else ""
    own = ", 1 all-reduce of parameters that every rank has whole" if sequence else ""
    return f"forward {sums} ({', '.join(branches)}){gathers}; backward {sums}{scatters}{own}"


def _once(stack: Stack, layers: Sequence[str]) -> str:
    """One path for layers of a stack: with ``*`` if these are all."""
    if len(layers) == len(stack.layers):
        return f"{stack.path}.*"
    return f"{stack.path}.[{', '.join(layer.removeprefix(f'{stack.path}.') for layer in layers)}]"
