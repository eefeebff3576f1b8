"""The one page on which techniques meet; the order of the calls is the order of application.

tensor -> context -> float8 -> recompute -> compile -> shard | replicate. A pipeline is cut first, and the same page is
applied to the stages of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint.full_state import whole
from lightning_parallel.checkpoint.stage_buffers import take_buffers_of_stages
from lightning_parallel.checkpoint.stage_entries import take_extra_states_of_stages
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.module.hidden_states import Lengths
from lightning_parallel.module.layer_stacks import ModuleStructure
from lightning_parallel.module.snapshot import Snapshot
from lightning_parallel.plan import Plan
from lightning_parallel.policies import LayerPolicies, Policies
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.ranks.mesh import Mesh
from lightning_parallel.ranks.stage_owners import stage_owners_of
from lightning_parallel.techniques.buffers import apply_buffer_dtype
from lightning_parallel.techniques.compiling import apply_compile
from lightning_parallel.techniques.context.layers import apply_context
from lightning_parallel.techniques.deferred_init.record import InitRecord
from lightning_parallel.techniques.float8 import PartProducts, apply_float8
from lightning_parallel.techniques.gathering import (
    gather_around_parts,
    gather_in_method,
    gather_in_steps,
    gather_outside_of_schedule,
)
from lightning_parallel.techniques.offload import build_offload_policy
from lightning_parallel.techniques.pipeline.cut import CutStack, cut_stack
from lightning_parallel.techniques.recompute import apply_recompute, parse_recompute
from lightning_parallel.techniques.replicate import synchronize_module
from lightning_parallel.techniques.sharding import (
    ShardingPlan,
    apply_sharding,
    finish_sharding,
    reshard_units,
    unreduced_parameters,
)
from lightning_parallel.techniques.tensor.between import watch_between
from lightning_parallel.techniques.tensor.layers import apply_tensor
from lightning_parallel.techniques.tensor.vocabulary import apply_vocabulary, keep_split

_KEY = "_lightning_parallel"
_ADDED = (
    "{0} trainable parameters were added when the module was parallel already, so nobody would shard them or average "
    "their gradients, and the ranks would drift apart: {1}. Add them in __init__, setup or configure_model"
)
_MOVED = (
    "{0} trainable parameters were made of others when these were sharded or split over ranks already, as by "
    "torch.nn.utils.prune and parametrize, and nobody would gather them for the modules that read them: {1}. Do so in "
    "__init__, setup or configure_model, or give ddp_custom or zero1_custom"
)


@dataclass(frozen=True)
class Parallelized:
    """A module that was made parallel, and what it takes to make it plain again.

    Args:
        mesh: The ranks.
        plan: What was done to it.
        sharding: The sharded units of this rank and the parameters that stay whole.
        snapshots: The module before each kind of change, in the order of application; the last is sharding.
        lengths: Local and global sequence lengths, for each stack that splits sequences.
        cut: The stack of which each rank has some stages; ``None`` without a pipeline.
        names: Names of the parameters.
    """

    mesh: Mesh
    plan: Plan
    sharding: ShardingPlan
    snapshots: tuple[Snapshot, ...]
    lengths: tuple[Lengths, ...] = ()
    cut: CutStack | None = None
    names: frozenset[str] = frozenset()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of a module is not parallel: it has no record. Parts of a tensor are not copied in the first place.
        return type(None), ()

    def replaced(self) -> dict[Tensor, Tensor]:
        """The module's own parameter -> the tensor that has replaced it."""
        return {own: current for snapshot in self.snapshots for own, current in snapshot.replaced()}

    def units(self, module: nn.Module) -> list[nn.Module]:
        """The sharded units, inner before outer."""
        return [module.get_submodule(path) for path in self.sharding.units]

    def averaged_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters that every rank holds whole, each once, in the same order on all ranks."""
        return [parameter for name, parameter in module.named_parameters() if name in self.sharding.whole]

    def undo(self, module: nn.Module) -> dict[Tensor, nn.Parameter]:
        """Make the module whole and plain on every rank. A collective.

        Returns:
            The tensor that had replaced a parameter -> the module's own parameter.
        """
        # A unit that is still gathered has its plain parameters registered in place of the shards.
        reshard_units(module)
        module.__dict__.pop(_KEY, None)
        if self.cut is not None:
            take_buffers_of_stages(module, self.cut.owners_by_name, self.mesh.pipeline_host_group)
            take_extra_states_of_stages(module)
        # All ranks gather the same parameters in the order of the names. The snapshots differ between ranks: each rank
        # of a pipeline has split and sharded the layers of its own stages only.
        replaced = set(self.replaced().values())
        values: dict[Tensor, Tensor] = {
            p: whole(p) for p in module.parameters() if p in replaced or stage_owners_of(p) is not None
        }
        own: dict[Tensor, nn.Parameter] = {}
        for snapshot in reversed(self.snapshots):
            own |= snapshot.restore(values.__getitem__)
        for parameter in module.parameters():
            parameter.grad = None  # on all ranks alike: parameters that were replaced have none
        return own


def parallelized(module: nn.Module) -> Parallelized | None:
    """The record of how `module` is parallel now; ``None`` if it is plain. An earlier fit may have left it parallel."""
    return module.__dict__.get(_KEY)


def left_over_violations(module: nn.Module, degrees: Degrees, policies: Policies) -> list[str]:
    """Reasons why a module that an earlier fit left sharded cannot be trained by other rules; empty if it can.

    Args:
        module: The user's module.
        degrees: Resolved degrees of this fit.
        policies: The rules of this fit.
    """
    left = parallelized(module)
    differences = [] if left is None else left.plan.changes(degrees, policies)
    if not differences:
        return []
    return [
        f"{type(module).__name__} is still sharded by an earlier fit, which ended in an error, or it is too large to "
        f"be made whole; it cannot be sharded by other rules ({'; '.join(differences)}). Give those of before, or "
        "start a new process"
    ]


def added_violations(module: nn.Module) -> list[str]:
    """Reasons why parameters that hooks have added since cannot be trained; empty if they can.

    Args:
        module: The parallel module, before a step.
    """
    record = parallelized(module)
    if record is None:
        return []
    named = list(module.named_parameters(remove_duplicate=False))
    known = {parameter for name, parameter in named if name in record.names}  # hooks give them further names, too
    new = {name: parameter for name, parameter in named if name not in record.names and parameter not in known}
    if moved := [name for name, parameter in new.items() if parameter.requires_grad and isinstance(parameter, DTensor)]:
        return [_MOVED.format(len(moved), ", ".join(moved[:8]))]
    if record.mesh.data.size() == 1 and record.cut is None:
        return []  # all ranks have the same samples and layers, so that their gradients are equal
    unreduced = unreduced_parameters(module, record.sharding, record.mesh.sharding)
    added = [name for name in unreduced if name in new]
    return [_ADDED.format(len(added), ", ".join(added[:8]))] if added else []


def parallelize(
    module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device, init: InitRecord | None = None
) -> Parallelized:
    """Apply `plan` to `module`, in place; return the record by which it is undone. Needs the process group; collective.

    Args:
        module: The whole module, on the host, on the device, or recorded on the meta device.
        plan: The changes to make.
        mesh: The ranks.
        device: This rank's device.
        init: The record from which to make tensors that are on the meta device.

    Raises:
        ConfigurationError: For violations, tensors that cannot be made, and parameters whose gradients nobody reduces.
    """
    check(plan.violations)
    policies = plan.policies
    with Snapshot(module) as pipeline:
        groups = {"group": mesh.pipeline_group, "host_group": mesh.pipeline_host_group}
        cut = cut_stack(module, plan.pipeline, **groups)
    structure = plan.structure if cut is None else cut.local(plan.structure)
    chains = [chain for stack in structure.stacks for chain in stack.chains]
    stacks = [[(path, module.get_submodule(path)) for path in chain] for chain in chains]
    with Snapshot(module) as tensor:
        # While every rank still has every parameter: a broadcast over all ranks has to name the same tensors on each.
        synchronize_module(module, device)
        if cut is not None:
            cut.release(module, device)
        lengths = _split(module, plan, stacks, mesh) if mesh.tensor is not None else []
    with Snapshot(module) as context:
        if mesh.context_group is not None:
            lengths += apply_context(stacks, mesh.context_group, attention=policies.context_attention)
    layers = transform_layers(module, structure, policies.layer, buffers=policies.sharding_dtypes.buffers)
    with Snapshot(module) as sharding:
        shards = plan.sharding[0 if cut is None else cut.group.rank()]
        _shard(module, shards, policies, mesh, device, init)
        _gather(module, plan, shards.units, structure, mesh, cut)
        for method in policies.forward_methods:
            gather_in_method(module, shards.units, method)
        if cut is not None:
            cut.tag(module)  # only now: sharding has replaced the parameter objects, which carry the tags
    _audit(module, shards, mesh)
    snapshots = (pipeline, tensor, context, layers, sharding)
    names = frozenset(name for name, _ in module.named_parameters(remove_duplicate=False))
    result = Parallelized(mesh, plan, shards, snapshots, tuple(lengths), cut, names)
    for own, current in result.replaced().items():
        current.__dict__.update(vars(own))  # marks that code reads, such as `parameter.no_weight_decay`
    module.__dict__[_KEY] = result
    return result


def _gather(
    module: nn.Module,
    plan: Plan,
    units: Sequence[str],
    structure: ModuleStructure,
    mesh: Mesh,
    cut: CutStack | None,
) -> None:
    """Gather parameters in steps and in calls of parts; a pipeline's schedule gathers around each microbatch."""
    if cut is not None and cut.turns is None:
        gather_outside_of_schedule(module, units, plan.structure.layers, cut.is_in_schedule)
        return
    gather_in_steps(module, units, plan.policies.step_methods)
    gather_around_parts(module, units, except_in=_opaque_layers(structure, plan.policies, mesh))


def _opaque_layers(structure: ModuleStructure, policies: Policies, mesh: Mesh) -> tuple[str, ...]:
    """Layers in which the attention that ranks share would not be found, if the compiler saw what gathers parts."""
    return structure.layers if mesh.context_group is not None and policies.layer.compile != "none" else ()


def _split(
    module: nn.Module, plan: Plan, stacks: Sequence[Sequence[tuple[str, nn.Module]]], mesh: Mesh
) -> list[Lengths]:
    """Apply tensor parallelism to the layers, and to embeddings and heads outside of them."""
    assert mesh.tensor is not None
    assert plan.tensor is not None
    if plan.tensor.unseen:  # until the first step has shown what their layers are given
        return []
    tables, policies = plan.tensor.tables, plan.policies
    float8 = policies.layer.float8
    lengths = apply_tensor(
        stacks,
        plan.tensor,
        mesh.tensor,
        peers=mesh.stage_host_group,
        sequence=policies.sequence,
        products=None if float8 in (None, "none") else PartProducts(str(float8), mesh.tensor.get_group()).of,
    )
    if policies.sequence:
        watch_between(module, stacks, lengths)
    if tables:
        apply_vocabulary({path: module.get_submodule(path) for path in tables}, mesh.tensor)
        keep_split(module, ("forward", *policies.step_methods), mesh.tensor)
    return lengths


def _shard(
    module: nn.Module,
    plan: ShardingPlan,
    policies: Policies,
    mesh: Mesh,
    device: torch.device,
    init: InitRecord | None,
) -> None:
    """Shard with FSDP2 after all other changes, and make the tensors that were only recorded."""
    apply_sharding(
        module,
        plan,
        mesh.sharding,
        reshard=policies.reshard,
        policy=policies.sharding_dtypes.fsdp,
        offload=build_offload_policy(policies.offload, device),
        device=device,
    )
    if init is not None:
        # After sharding, so that no rank ever holds the whole module.
        init.materialize(module, device, shards_on=torch.device("cpu") if policies.offload == "all" else device)
    finish_sharding(module, plan)


def transform_layers(
    module: nn.Module,
    structure: ModuleStructure,
    policies: LayerPolicies,
    *,
    buffers: torch.dtype | None = None,
) -> Snapshot:
    """Change how the layers of the stacks compute, in place. No collective.

    Args:
        module: The whole module.
        structure: The paths of its layers.
        policies: The changes to each layer.
        buffers: Dtype of floating-point buffers in forward, of all submodules.

    Returns:
        A snapshot of the module before; its `restore` undoes the changes.
    """
    layers = [module.get_submodule(path) for path in dict.fromkeys(structure.layers)]
    recompute = parse_recompute(policies.recompute)
    assert recompute is not None
    with Snapshot(module) as snapshot:
        # From the inside out: float8 replaces the linear maps, recomputation wraps the layer's forward, and compilation
        # traces the result with both.
        if policies.float8 not in (None, "none"):
            apply_float8(layers, str(policies.float8))
        apply_buffer_dtype(module, buffers)
        apply_recompute(layers, recompute)
        if policies.compile == "layers":
            apply_compile(layers, budget=recompute.budget)
    return snapshot


def _audit(module: nn.Module, plan: ShardingPlan, mesh: Mesh) -> None:
    # A parameter that nobody reduces raises no error in training: the ranks would drift apart unnoticed.
    if forgotten := unreduced_parameters(module, plan, mesh.sharding):
        raise ConfigurationError(
            [
                f"{len(forgotten)} trainable parameters are neither sharded nor averaged, so the ranks would drift "
                f"apart: {', '.join(forgotten[:8])}. Register them on a module, or freeze them"
            ]
        )
