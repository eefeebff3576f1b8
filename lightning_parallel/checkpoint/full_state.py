"""Whole, plain checkpoints, as one process would have written them, from and to any strategy.

The file is Lightning's own: a plain `state_dict`, and optimizer states keyed by the parameter's number. It loads in
Lightning without this package and in torch.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from lightning_parallel import _torch
from lightning_parallel.checkpoint.copies import unshared
from lightning_parallel.checkpoint.outline import outline_of
from lightning_parallel.checkpoint.stage_entries import take_entries_of_stages
from lightning_parallel.checkpoint.stored_tensors import StoredTensors
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import local_of, sharded_like, whole_on_device, whole_on_host
from lightning_parallel.ranks.stage_owners import StageOwners, all_stage_owners, stage_owners_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def full_state_dict(trainer: Trainer) -> dict[str, Tensor]:
    """The whole model as plain CPU tensors on rank 0, and ``{}`` on the other ranks. A collective: call it on all.

    Keys, shapes and dtypes are those of the plain module's ``state_dict()``, buffers and tied names included. It works
    under every strategy, in hooks, and after ``fit`` has returned.

    Args:
        trainer: A trainer that has a module.

    Example:
        >>> trainer.fit(module)
        >>> weights = full_state_dict(trainer)
        >>> if trainer.is_global_zero:
        ...     torch.save(weights, "weights.pt")
    """
    return whole_state_dict(trainer.lightning_module, keep=trainer.is_global_zero, copy=True)


@torch.no_grad()
def whole(tensor: Tensor, owners: StageOwners | None = None) -> Tensor:
    """The whole of `tensor` as a plain tensor in host memory, on every rank. A collective if it is sharded.

    Args:
        tensor: A parameter, buffer or optimizer state.
        owners: The stages that hold it, where it has no tag.

    Returns:
        A tensor of the whole shape; it shares memory with a plain `tensor` in host memory.
    """
    owners = owners or stage_owners_of(tensor)
    if owners is not None:
        # Ranks of the owner's stage gather its shards among themselves; then each sends to its peers in other stages,
        # which have a placeholder of the whole shape.
        if tensor.layout is not torch.strided:  # how many values it has, only its owner knows
            sent = whole_on_host(tensor) if owners.counts_here else None
            return owners.object_from_owner(sent)  # type: ignore[no-any-return]
        here = whole_on_host(tensor) if owners.counts_here else torch.empty(tensor.shape, dtype=tensor.dtype)
        return owners.from_owner(here)
    return whole_on_host(tensor)


def whole_state_dict(module: nn.Module, *, keep: bool, copy: bool = False, outlines: bool = False) -> dict[str, Any]:
    """The plain module's ``state_dict()`` in host memory. A collective, one tensor at a time.

    Args:
        module: The module, sharded or not.
        keep: Whether this rank wants the result; others get ``{}`` and hold one tensor at a time.
        copy: Whether to copy tensors that are in host memory already, so that training does not change the result.
        outlines: Whether others get all names, with `outline_of`.
    """
    firsts, owners_by_name = first_names(module), all_stage_owners(module)
    own = module.state_dict()
    take_entries_of_stages(module, own, keep=keep)
    result: OrderedDict[str, Any] = OrderedDict()  # `OrderedDict[str, Any]()` would save its type arguments
    if keep:
        _take_metadata(result, own)
    for name, value in own.items():
        if (first := firsts.get(name, name)) != name and (first in result or not keep):
            if keep:
                result[name] = result[first]  # tied weights stay one tensor, in memory and in the file
            continue
        gathered = _gathered(value, keep, owners_by_name.get(name))
        if keep:
            result[name] = gathered.clone() if copy and _share_memory(gathered, value) else gathered
    return outline_of(own) if outlines and not keep else result


def whole_optimizer_state(optimizer: Optimizer, *, keep: bool, is_cut: bool = True) -> dict[str, Any]:
    """The plain optimizer's ``state_dict()`` in host memory; ``{}`` where not `keep`. A collective.

    Args:
        optimizer: The optimizer.
        keep: Whether this rank wants the result.
        is_cut: Whether it trains the parameters that the module has now. Those of an earlier fit are whole again, and
            their state is not gathered a second time.
    """
    state = optimizer.state_dict()
    gathered = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        entries = state["state"].get(number)
        # Also without entries here: a rank of another stage has none, and still takes part in the broadcast.
        if is_cut and (owners := stage_owners_of(parameter)) is not None:
            gathered[number] = _from_owner(entries, owners, keep)
        elif entries is not None:
            gathered[number] = {name: _gathered(value, keep) for name, value in entries.items()}
    gathered = {number: entries for number, entries in gathered.items() if entries is not None}
    return {**state, "state": gathered} if keep else {}


def load_whole_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> None:
    """Load a plain ``state_dict`` into `module`, sharded or not. Every rank has the whole dict; no collective.

    Args:
        module: The module, changed in place.
        state_dict: Names of the plain module -> whole tensors in host memory, or stored ones, of which each rank reads
            what it has.
        strict: Whether missing and unexpected names are errors.

    Raises:
        RuntimeError: torch's own, for keys and shapes that do not match.
    """
    targets = module.state_dict()
    if isinstance(state_dict, StoredTensors):
        sharded = _read_into(targets, state_dict, strict=strict)
    else:
        # Torch copies parameters and buffers; as the state of a metric, a module takes what it is given.
        own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        own |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
        parts = (
            (n, _like(each, targets.get(n)) if n in own else copy.deepcopy(each)) for n, each in state_dict.items()
        )
        sharded = OrderedDict(parts)
    _take_metadata(sharded, state_dict)
    module.load_state_dict(sharded, strict=strict)


def _read_into(targets: Mapping[str, Any], stored: StoredTensors, *, strict: bool) -> OrderedDict[str, Any]:
    """The tensors of `stored` for a module: read into the `targets` themselves where all of them fit, else beside them.

    Args:
        targets: The module's own ``state_dict``.
        stored: Tensors in files.
        strict: Whether names have to be the same.
    """
    known = [name for name in stored if name in targets]
    fit = all(stored.shape_of(name) in (None, getattr(targets[name], "shape", None)) for name in known)
    if not fit or (strict and len(known) != max(len(stored), len(targets))):
        # The module's own hooks may give tensors other names or shapes; else torch says what does not fit.
        return OrderedDict((name, stored.part_like(name, targets.get(name))) for name in stored)
    is_read = {n: targets[n] for n in known if stored.shape_of(n) is not None and not is_placeholder(targets[n])}
    stored.read_into(is_read)
    return OrderedDict((name, stored[name] if stored.shape_of(name) is None else targets[name]) for name in known)


def load_whole_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Load a plain optimizer's ``state_dict()`` into `optimizer`, whose parameters may be sharded. No collective.

    Args:
        optimizer: Changed in place.
        state: Whole tensors in host memory; every rank has all of it.
    """
    parameters = _parameters(optimizer)
    reads: dict[str, Tensor] = {}
    shards = {
        number: _part_of_entries(entries, parameters[number], reads)
        for number, entries in state["state"].items()
        if not is_placeholder(parameters[number])
    }
    folders = {id(e.folder): e.folder for e in state["state"].values() if isinstance(e, StoredTensors)}
    for folder in folders.values():
        folder.read(reads)
    loaded = {**state, "state": shards}
    # Copies: torch would take the tensors themselves, which may be in a file that is mapped.
    optimizer.load_state_dict(unshared(loaded) if not folders else loaded)


def make_optimizer_whole(optimizer: Optimizer, own: Mapping[Tensor, Tensor]) -> None:
    """Give `optimizer` the module's plain parameters back, with whole state. A collective.

    Args:
        optimizer: Changed in place: the object, its groups and its schedulers are kept.
        own: The tensor that had replaced a parameter -> the module's own parameter (`Snapshot.restore`).
    """

    def whole_state(state: dict[str, Any] | None, old: Tensor, new: Tensor) -> dict[str, Any] | None:
        if (owners := stage_owners_of(old)) is not None:
            return _from_owner(state, owners)
        return None if state is None else _whole_entries(state)

    _replace_parameters(optimizer, own, whole_state)


def make_optimizer_sharded(optimizer: Optimizer, sharded: Mapping[Tensor, Tensor]) -> None:
    """Give `optimizer` the tensors that have replaced the module's own parameters, with its state sharded alike.

    Optimizers that were made before the module was sharded refer to parameters that are no longer used: those of
    LightningCLI, and those made in a module's `__init__`.

    Args:
        optimizer: Changed in place: the object, its groups and its schedulers are kept.
        sharded: The module's own parameter -> the tensor that has replaced it.
    """

    def sharded_state(state: dict[str, Any] | None, old: Tensor, new: Tensor) -> dict[str, Any] | None:
        return None if state is None else {name: _like_state(value, new) for name, value in state.items()}

    _replace_parameters(optimizer, sharded, sharded_state)


def _replace_parameters(
    optimizer: Optimizer,
    replacement: Mapping[Tensor, Tensor],
    convert: Callable[[dict[str, Any] | None, Tensor, Tensor], dict[str, Any] | None],
) -> None:
    """Replace parameters; `convert` makes the state of the new one from the state, the old and the new parameter."""
    for group in optimizer.param_groups:
        for index, old in enumerate(group["params"]):
            group["params"][index] = new = replacement.get(old, old)
            # Always called: `convert` may be a collective, and other ranks have state where this one has none.
            state = convert(optimizer.state.pop(old, None), old, new)
            if state is not None and not is_placeholder(new):
                optimizer.state[new] = state


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _from_owner(entries: Mapping[str, Any] | None, owners: StageOwners, keep: bool = True) -> dict[str, Any] | None:
    """The whole optimizer state of a parameter, from the stage that owns it. A collective of the pipeline.

    Where not `keep`, rank 0 alone wants it: pipelines without that rank only help to gather.
    """
    if not keep and not owners.reaches_first_rank:
        for value in (entries or {}).values() if owners.counts_here else ():
            _gathered(value, keep)
        return None
    if not owners.counts_here or entries is None:
        return owners.object_from_owner(None)  # type: ignore[no-any-return]
    return owners.object_from_owner(_whole_entries(entries))  # type: ignore[no-any-return]


def _whole_entries(entries: Mapping[str, Any]) -> dict[str, Any]:
    return {name: whole_on_host(value) if isinstance(value, Tensor) else value for name, value in entries.items()}


def first_names(module: nn.Module) -> dict[str, str]:
    """Name of a parameter -> the first of its names, so that tied weights are gathered once, on all ranks alike."""
    first: dict[Tensor, str] = {}
    return {name: first.setdefault(p, name) for name, p in module.named_parameters(remove_duplicate=False)}


def _take_metadata(target: Any, source: Any) -> None:
    """Let `target` say what `source` does of the versions of modules, by which these load files of earlier ones."""
    if hasattr(source, "_metadata"):
        target._metadata = source._metadata


def _share_memory(gathered: Any, value: Any) -> bool:
    """Whether gathering made no copy: the tensor is plain and on the host, or sharded over a single rank."""
    if not isinstance(value, Tensor) or is_placeholder(value):
        return False
    return _torch.dense_parts.share_memory(gathered.detach(), local_of(value).detach())


@torch.no_grad()
def _gathered(value: Any, keep: bool, owners: StageOwners | None = None) -> Any:
    """The whole of `value` in host memory for rank 0, if this rank shall `keep` it. A collective if it is sharded."""
    if not isinstance(value, Tensor):
        return value
    owners = owners or stage_owners_of(value)
    if keep or (owners is not None and owners.reaches_first_rank):
        return whole(value, owners)
    # Others want this rank's part of it, and nobody wants it in this rank's host memory.
    if owners is None or owners.counts_here:
        whole_on_device(value)
    return None


def _like(value: Any, target: Any) -> Any:
    if not isinstance(target, DTensor) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    return sharded_like(value, target)


def _part_of_entries(entries: Mapping[str, Any], parameter: Tensor, reads: dict[str, Tensor]) -> dict[str, Any]:
    """This rank's part of the state of a parameter; what of it is in files is to be read, as `reads` has it then."""
    if isinstance(entries, StoredTensors):
        parts = ((name, entries.part_like(name, parameter, reads)) for name in entries)
        return {name: part if isinstance(part, DTensor) else _like_state(part, parameter) for name, part in parts}
    return {name: _like_state(value, parameter) for name, value in entries.items()}


def _like_state(value: Any, parameter: Tensor) -> Any:
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if hasattr(type(value), "__tensor_flatten__") and not isinstance(value, DTensor):
        kind = f"{type(value).__module__.partition('.')[0]}'s {type(value).__name__}"
        raise ConfigurationError([_PACKED.format(kind)])
    # Factored moments have other shapes than the parameter. They are whole on every rank.
    same = value.shape == parameter.shape
    placements = parameter.placements if same else [Replicate()] * parameter.device_mesh.ndim
    return sharded_like(value, parameter, placements)


_PACKED = (
    "the checkpoint has optimizer state that is packed ({0}), which cannot be cut for the ranks that share parameters; "
    "use ddp_custom or zero1_custom to resume, or load the weights alone, as by load_from_checkpoint"
)
