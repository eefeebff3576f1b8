"""Shard parameters, gradients and optimizer state with FSDP2, one unit a layer.

Source: Zhao et al. 2023, "PyTorch FSDP"; Rajbhandari et al. 2020, "ZeRO"; `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from lightning_parallel import _torch
from lightning_parallel.module.given_containers import giving_back
from lightning_parallel.module.layer_stacks import first_names, owner_of
from lightning_parallel.module.placeholders import is_placeholder

ROOT = ""


@dataclass(frozen=True)
class ShardingPlan:
    """Units of sharding, and parameters that stay whole on every rank.

    Args:
        units: Paths of the units, inner before outer; ``""`` is the module itself.
        whole: Name of a parameter that is not sharded -> the reason. Its gradient is averaged over the ranks instead.
        num_bytes: Of the parameters of each unit, whole and in the dtype that they have.
        numel: Their elements, which may be gathered in another dtype.
    """

    units: tuple[str, ...]
    whole: dict[str, str]
    num_bytes: tuple[int, ...] = field(default=(), compare=False)
    numel: tuple[int, ...] = field(default=(), compare=False)


def plan_sharding(
    module: nn.Module,
    units: Sequence[str],
    *,
    root_is_unit: bool,
    casts: bool = False,
    absent: Collection[str] = (),
    module_dtype: torch.dtype | None = None,
) -> ShardingPlan:
    """Decide which parameters are sharded together; changes nothing.

    Args:
        module: The whole module.
        units: Paths of submodules that can be sharded by themselves (`ModuleStructure.units`).
        root_is_unit: Whether the module itself is the unit of parameters that are in no other. Not under manual
            optimization: there backward runs inside the forward of the module, and a unit cannot reduce gradients
            before its forward has ended. The outermost submodules with a forward are units then.
        casts: Whether parameters are gathered in another dtype. Those of BatchNorm then stay whole and keep theirs,
            because torch has no kernel for weights and statistics of two dtypes, and so do those of parametrizations,
            which compute weights.
        absent: Names of parameters that this rank does not hold: those of other pipeline stages.
        module_dtype: The dtype to which the module is converted before it is sharded, if it is.
    """
    outer = [ROOT] if root_is_unit else [path for path in _outermost(module) if path not in units]
    paths = sorted({*units, *outer}, key=lambda path: (-_depth(path), path))
    of_units = frozenset(paths)
    first = first_names(module)
    owners = {name: owner_of(first[name], of_units) for name, _ in module.named_parameters(remove_duplicate=False)}
    whole = {name: "no unit holds it" for name, owner in owners.items() if owner is None}
    whole |= dict(_shared_across_units(module, owners))
    whole |= dict(_unshardable(module, owners, module_dtype))
    if casts:
        whole |= dict.fromkeys(
            _uncast_parameters(module), "BatchNorm or a parametrization, which compute in their own dtype"
        )
    num_bytes: Counter[str | None] = Counter()
    numel: Counter[str | None] = Counter()
    for name, parameter in module.named_parameters():
        if name not in whole and name not in absent:
            dtype = module_dtype if module_dtype is not None and parameter.is_floating_point() else parameter.dtype
            numel[owners[name]] += parameter.numel()
            num_bytes[owners[name]] += parameter.numel() * dtype.itemsize
    return ShardingPlan(
        tuple(paths),
        {name: reason for name, reason in whole.items() if name not in absent},
        tuple(num_bytes[path] for path in paths),
        tuple(numel[path] for path in paths),
    )


def keep_whole(module: nn.Module, absent: Collection[str] = ()) -> ShardingPlan:
    """Plan without units, for a single rank: FSDP2 would copy parameters to gather them, even from itself.

    Args:
        module: The whole module.
        absent: Names of parameters that this rank does not hold: those of other pipeline stages.
    """
    names = (name for name, _ in module.named_parameters(remove_duplicate=False) if name not in absent)
    return ShardingPlan((), dict.fromkeys(names, "no other rank shares it"))


def apply_sharding(
    module: nn.Module,
    plan: ShardingPlan,
    mesh: DeviceMesh,
    *,
    reshard: str | int,
    policy: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    device: torch.device,
) -> None:
    """Shard `module` in place: its parameters become DTensors on `mesh`. Needs the process group.

    Args:
        module: The whole module, on the host or on the device; each unit is moved to the device and sharded in turn.
        plan: The result of `plan_sharding`.
        mesh: One axis to shard over, or an axis to replicate over and one to shard over (HSDP).
        reshard: ``"always"`` frees gathered parameters after forward, ``"never"`` keeps them until the gradients are
            reduced (ZeRO-2), a number keeps them sharded over that many ranks.
        policy: Dtypes of gathering and reducing.
        offload: Whether shards are on the device or on the host.
        device: The rank's device.
    """
    whole = {p for name, p in module.named_parameters(remove_duplicate=False) if name in plan.whole}
    for tensor in (*whole, *module.buffers()):
        if not tensor.is_meta:  # deferred initialisation makes those on the device
            tensor.data = tensor.data.to(device)
    elsewhere = {parameter for parameter in module.parameters() if is_placeholder(parameter)}
    for path in plan.units:
        _shard_unit(
            module.get_submodule(path),
            mesh=mesh,
            reshard_after_forward=_reshard_after_forward(reshard, is_outermost=_is_outermost(path, plan)),
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=whole | elsewhere,
        )


def _shard_unit(unit: nn.Module, *, ignored_params: set[nn.Parameter], **options: Any) -> None:
    """Shard one unit, and free its whole parameters.

    Others refer to these until the module is whole again, a snapshot and optimizers among them. `fully_shard` has moved
    them to the device, which would hold the whole module before its last unit is sharded.
    """
    own = {parameter for parameter in unit.parameters() if parameter not in ignored_params}
    for parameter in own:
        if not parameter.is_contiguous():  # channels_last: FSDP2 takes rows of contiguous tensors only
            parameter.data = parameter.data.contiguous()
    _torch.unit_classes.prepare_class(unit)
    fully_shard(unit, ignored_params=ignored_params, **options)
    for original in own - set(unit.parameters()):
        if not (original.is_meta or isinstance(original, DTensor)):  # nobody refers to the latter, which are ours
            original.data = original.data.new_empty(0)


def finish_sharding(module: nn.Module, plan: ShardingPlan) -> None:
    """Set the root units, once deferred initialisation has made all tensors.

    Args:
        module: The sharded module.
        plan: The result of `plan_sharding`.
    """
    for path in plan.units:
        unit = module.get_submodule(path)
        _torch.unit_classes.refuse_second_order(unit, path)
        if _is_outermost(path, plan):
            _torch.fsdp.initialize_sharding(unit)
        # The step methods gather the root's parameters (`gathering.py`), so the hooks of `forward` must not.
        if path == ROOT:
            _torch.fsdp.drop_forward_hooks(unit)
        else:
            _torch.unit_calls.note_arguments(unit, giving_back)


def reshard_units(module: nn.Module) -> None:
    """Free gathered parameters, so that the module's parameters are its shards. Cheap where nothing is gathered."""
    for submodule in module.modules():
        if isinstance(submodule, FSDPModule):
            submodule.reshard()


def leave_forward(module: nn.Module) -> None:
    """Bring all units back to their shards after a forward without backward. Held gradients stay. No collective."""
    for submodule in module.modules():
        _torch.fsdp.leave_forward(submodule)


def abandon_step(module: nn.Module) -> None:
    """Bring all units back to their shards after an error in a step, and drop gradients. No collective."""
    for submodule in module.modules():
        _torch.fsdp.abandon_step(submodule)


def is_sharded(module: nn.Module) -> bool:
    """Whether any submodule is a unit of FSDP2."""
    return any(isinstance(submodule, FSDPModule) for submodule in module.modules())


def unreduced_parameters(module: nn.Module, plan: ShardingPlan, mesh: DeviceMesh) -> list[str]:
    """Names of trainable parameters that are neither sharded on `mesh` nor averaged: ranks would drift apart.

    Args:
        module: The sharded module.
        plan: The result of `plan_sharding`.
        mesh: The mesh over which it is sharded.
    """
    return [
        name
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
        and name not in plan.whole
        and not (is_placeholder(parameter) or _is_on(parameter, mesh))
    ]


def _is_on(parameter: Tensor, mesh: DeviceMesh) -> bool:
    """Whether `parameter` is sharded on `mesh`; it may be split over another axis as well."""
    if not isinstance(parameter, DTensor):
        return False
    return set(mesh.mesh_dim_names or ()) <= set(parameter.device_mesh.mesh_dim_names or ())


def _reshard_after_forward(reshard: str | int, *, is_outermost: bool) -> bool | int | None:
    if reshard == "never":
        return False
    if is_outermost:
        return None  # torch's default, which keeps the root gathered: backward begins with it
    return True if reshard == "always" else int(reshard)


def _outermost(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of the outermost submodules with a forward of their own; lists and dicts of modules have none."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
            yield from _outermost(child, child_path)
        elif next(child.parameters(), None) is not None:
            yield child_path


def _is_outermost(path: str, plan: ShardingPlan) -> bool:
    return not any(path != other and (other == ROOT or path.startswith(f"{other}.")) for other in plan.units)


def _depth(path: str) -> int:
    return path.count(".") + 1 if path else 0


def _shared_across_units(module: nn.Module, owners: dict[str, str | None]) -> Iterator[tuple[str, str]]:
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
    for aliases in names.values():
        if len({owners[alias] for alias in aliases}) > 1:
            yield from ((alias, f"{aliases[0]} and {aliases[1]} are one parameter of two units") for alias in aliases)


def _unshardable(
    module: nn.Module, owners: dict[str, str | None], module_dtype: torch.dtype | None
) -> Iterator[tuple[str, str]]:
    """Parameters that FSDP2 cannot shard: scalars, empty ones, and trainable ones of a second dtype in a unit."""
    trainable = [(n, p) for n, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]
    sizes: dict[str | None, Counter[torch.dtype]] = defaultdict(Counter)
    dtypes = {n: module_dtype if module_dtype and p.is_floating_point() else p.dtype for n, p in trainable}
    for name, parameter in trainable:
        sizes[owners[name]][dtypes[name]] += parameter.numel()
    for name, _ in trainable:
        if dtypes[name] != (main := sizes[owners[name]].most_common(1)[0][0]):
            yield name, f"{dtypes[name]} in a unit of {main}"
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.ndim == 0 or parameter.numel() == 0:
            yield name, "a scalar" if parameter.ndim == 0 else "empty"


def _uncast_parameters(module: nn.Module) -> Iterator[str]:
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, ParametrizationList)
    for path, submodule in module.named_modules(remove_duplicate=False):
        if isinstance(submodule, kinds):
            yield from (f"{path}.{name}" if path else name for name, _ in submodule.named_parameters(recurse=False))
