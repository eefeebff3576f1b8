"""The plan of a module: its structure and the changes to make to it, worked out once, before anything is changed.

A plan follows from a module, resolved degrees and policies. It needs no process group, holds no tensor, can be compared
and printed. Refusals, `explain` and `parallelize` read the plan and do not examine the module again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import nn

from lightning_parallel.dtypes import DtypePolicy
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.layer_stacks import ModuleStructure, find_layers
from lightning_parallel.module.recorded_calls import LayerCall
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.techniques.float8 import unfitting_violations
from lightning_parallel.techniques.pipeline.placement import Placement, placement_in_turns
from lightning_parallel.techniques.pipeline.plan import (
    PipelinePlan,
    cut_violations,
    plan_pipeline,
    sharing_violations,
)
from lightning_parallel.techniques.pipeline.schedules import pipeline_violations
from lightning_parallel.techniques.recompute import statistics_violations
from lightning_parallel.techniques.sharding import ShardingPlan, keep_whole, plan_sharding
from lightning_parallel.techniques.tensor.plan import TensorPlan, plan_tensor, split_statistics_violations
from lightning_parallel.techniques.tensor.splits import describe_splits


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The changes that will be made to one module.

    Args:
        module: The name of its class.
        structure: Its layer stacks, as found or as named by the user.
        degrees: Resolved degrees.
        policies: The rules.
        tensor: The split of each linear map; ``None`` with ``tensor=1``.
        pipeline: The stages; ``None`` with ``pipeline=1``, and where the stack cannot be cut.
        sharding: For each rank of the pipeline, the sharded units and what stays whole; empty where FSDP2 shards
            nothing (DDP, ZeRO-1, DataParallel).
        violations: Reasons why the plan cannot be carried out, each with the possible alternatives; empty if it can.

    Example:
        >>> print(build_plan(module, Degrees().resolve(8), Policies()).to_json())
    """

    module: str
    structure: ModuleStructure
    degrees: Degrees
    policies: Policies
    tensor: TensorPlan | None = None
    pipeline: PipelinePlan | None = None
    sharding: tuple[ShardingPlan, ...] = ()
    violations: tuple[str, ...] = ()

    def changes(self, degrees: Degrees, policies: Policies) -> list[str]:
        """List the rules in which this plan differs from others.

        Args:
            degrees: Resolved degrees to compare with.
            policies: Rules to compare with.

        Returns:
            A phrase for each difference; empty if there is none.
        """
        pairs = {name: (getattr(self.policies, name), getattr(policies, name)) for name in vars(policies)}
        del pairs["step_methods"]  # the module's own
        pairs["degrees"] = self.degrees, degrees
        return [f"{name}: {old} before, {new} now" for name, (old, new) in pairs.items() if old != new]

    @property
    def replaces_parameters(self) -> bool:
        """Whether any parameter is sharded, split or cut; on one rank, for offload or a copy in another dtype."""
        degrees = self.degrees
        is_alone = degrees.data == degrees.context == degrees.tensor == degrees.pipeline == 1
        return self.policies.shards and (not is_alone or any(sharding.units for sharding in self.sharding))

    def to_json(self) -> str:
        """The plan as JSON: dtypes by name, sets as sorted lists."""
        return json.dumps(_plain(self), indent=2)


def build_plan(module: nn.Module, degrees: Degrees, policies: Policies) -> Plan:
    """Plan what `policies` do to `module` on the ranks of `degrees`. Changes nothing, and needs no process group.

    Args:
        module: The whole module, on any device, as its author wrote it.
        degrees: Resolved degrees.
        policies: The rules.

    Example:
        >>> build_plan(module, Degrees(tensor=2).resolve(4), Policies()).violations
        ()
    """
    name = type(module).__name__
    try:
        structure = find_layers(module, policies.layer.layers)
    except ConfigurationError as error:
        # A plan in which only this is refused: without stacks, further reasons would follow from this one.
        structure = find_layers(module, [])
        return Plan(
            module=name, structure=structure, degrees=degrees, policies=policies, violations=tuple(error.violations)
        )
    plan = Plan(module=name, structure=structure, degrees=degrees, policies=policies)
    violations = _layer_violations(module, plan)
    if structure.layers and degrees.tensor != 1:
        plan = _with_splits(module, plan)
        violations += plan.violations
    if structure.layers and degrees.pipeline != 1:
        size = _number(degrees.pipeline)
        # Faults of the policy alone were reported when the Trainer was made; here they only prevent planning stages.
        found = pipeline_violations(policies.pipeline, size) or cut_violations(structure, policies.pipeline, size)
        violations += found
        if not found:
            pipeline = plan_pipeline(module, structure, policies.pipeline, size, takes_turns=policies.takes_turns)
            plan = replace(plan, pipeline=pipeline)
            violations += sharing_violations(module, structure) if policies.takes_turns else []
    violations += _after_cutting(module, plan)
    # Units of a plan that is refused are not used, and finding them may fail for the same reasons.
    plan = replace(plan, violations=tuple(violations))
    return plan if violations else replace(plan, sharding=_plan_shards(module, plan))


def split_again(plan: Plan, module: nn.Module, calls: Mapping[str, LayerCall]) -> Plan:
    """Return the same plan with layers split by what a step has shown of their arguments; it may be refused.

    Args:
        plan: The plan of a module with layers whose arguments could not be guessed.
        module: The whole module.
        calls: Path of a layer -> how the step has called it.
    """
    return _with_splits(module, plan, calls)


def cut_again(plan: Plan, module: nn.Module, placement: Placement) -> Plan:
    """Return the same plan with its stages cut according to the trace of a step.

    Args:
        plan: The plan of a module with a pipeline.
        module: The whole module.
        placement: Where the traced step used each parameter, and the measured times if there are any.
    """
    assert plan.pipeline is not None
    if placement.takes_turns:
        placement = placement_in_turns(module, placement.layers)
    size = plan.pipeline.stages.num_ranks
    pipeline = plan_pipeline(module, plan.structure, plan.policies.pipeline, size, placement)
    plan = replace(plan, pipeline=pipeline)
    return replace(plan, sharding=_plan_shards(module, plan))


def module_key(module: nn.Module) -> tuple[Any, ...]:
    """A key that changes when the plan of `module` may change: names, classes, and which parameters are trained."""
    # With duplicates: tied parameters and layers used twice are part of the structure.
    modules = tuple((path, type(child)) for path, child in module.named_modules(remove_duplicate=False))
    parameters = tuple((n, id(p), p.requires_grad) for n, p in module.named_parameters(remove_duplicate=False))
    return modules, parameters


def _with_splits(module: nn.Module, plan: Plan, calls: Mapping[str, LayerCall] | None = None) -> Plan:
    structure, degree = plan.structure, plan.degrees.tensor
    tensor = plan_tensor(module, structure, plan.policies.tensor_plan, degree=degree, calls=calls)
    violations = [*tensor.violations, *split_statistics_violations(module, tensor, structure.layers)]
    if plan.degrees.pipeline != 1:  # no rank calls the layers of other stages
        violations += [layers.reason for layers in tensor.unseen]
    if not tensor.violations:
        splits = describe_splits(module, structure, tensor.roles, tensor.tables, _number(degree))
        tensor = replace(tensor, splits=splits)
    return replace(plan, tensor=tensor, violations=tuple(violations))


def _number(degree: Any) -> int:
    assert isinstance(degree, int)
    return degree


def _layer_violations(module: nn.Module, plan: Plan) -> list[str]:
    """Reasons that concern options which need a stack of layers."""
    degrees, policies = plan.degrees, plan.policies.layer
    cutting = {n: d for n in ("context", "tensor", "pipeline") if (d := getattr(degrees, n)) != 1}
    needs_stack: dict[str, object] = {**policies.are_on, **cutting}
    if needs_stack and not plan.structure.layers:
        chosen = ", ".join(f"{name}={value!r}" for name, value in needs_stack.items())
        return [
            f"{chosen} works layer by layer, and {plan.module} has no stack of repeated layers; name one "
            "with layers='path.to.the.list' (a ModuleList or Sequential), or leave it out"
        ]
    return []


def _after_cutting(module: nn.Module, plan: Plan) -> list[str]:
    """Reasons that concern the layers, once it is known how they are split and cut."""
    paths, policies = plan.structure.layers, plan.policies
    layers = [module.get_submodule(path) for path in paths]
    found = []
    if layers:
        found += unfitting_violations(layers, policies.layer.float8)
        found += statistics_violations(layers, policies.layer.recompute, compiles=policies.layer.compile == "layers")
    return found


def _plan_shards(module: nn.Module, plan: Plan) -> tuple[ShardingPlan, ...]:
    """The sharded units on each rank of the pipeline."""
    if not plan.policies.shards:
        return ()
    if plan.pipeline is None:
        return (_plan_shards_of(module, plan, plan.structure, frozenset()),)
    return tuple(
        _plan_shards_of(module, plan, plan.pipeline.local(plan.structure, rank), plan.pipeline.absent(rank))
        for rank in range(plan.pipeline.stages.num_ranks)
    )


def _plan_shards_of(module: nn.Module, plan: Plan, structure: ModuleStructure, absent: frozenset[str]) -> ShardingPlan:
    policies, dtypes = plan.policies, plan.policies.sharding_dtypes
    # Ranks that share a sequence also share parameters: their gradients are of different positions.
    num_sharers = plan.degrees.data * _number(plan.degrees.context)
    if num_sharers == 1 and dtypes.fsdp == DtypePolicy().fsdp and policies.offload != "all":
        # Over one rank, FSDP2 would copy every parameter in each forward and backward and save nothing.
        return keep_whole(module, absent)
    return plan_sharding(
        module,
        structure.units,
        # Under manual optimization backward runs inside the module's own forward, and FSDP2 cannot reduce gradients of
        # a unit whose forward has not ended.
        root_is_unit=not policies.backward_in_step,
        casts=dtypes.param is not None,
        absent=absent,
        module_dtype=policies.module_dtype,
    )


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(_plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
