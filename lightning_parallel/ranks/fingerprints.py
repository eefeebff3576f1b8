"""Fingerprints of what ranks hold: equal on ranks that must hold the same values."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.stage_owners import stage_owners_of

Fingerprint = tuple[Hashable, str, int]
"""The group of values, the name of one, which no other has, and a number made from its bytes. Ranks that have a group
have it alike."""
Partings = dict[str, list[list[list[int]]]]
"""Name of a value -> for each part of which ranks differ, the ranks that hold it, those with equal values together."""
_MOST_NAMED = 4
_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> whole numbers of as many."""


def of_parameters(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[Fingerprint]:
    """Take the fingerprints of parameters.

    Args:
        parameters: Names and parameters, of which a rank may have a part.
    """
    for name, parameter in parameters:
        yield _part_of(parameter, parameter), name, _number(parameter)


def of_copies(parameters: Iterable[tuple[str, Tensor]]) -> list[Fingerprint]:
    """Take the fingerprints of parameters where they are: the sums of their bits, sent to the host in one piece.

    Parameters of classes of their own, which may keep their values elsewhere, and of 8 bits are left out.

    Args:
        parameters: As in `of_parameters`.
    """
    named = [(name, p, local_of(p.detach())) for name, p in parameters]
    named = [each for each in named if type(each[2]) is Tensor and each[2].layout is torch.strided]
    named = [each for each in named if each[2].element_size() > 1 or not each[2].is_floating_point()]
    sums = [_sum_of_bits(local) for *_, local in named]
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(sums):
        by_device.setdefault(each.device, []).append(index)
    numbers: dict[int, int] = {}
    for indices in by_device.values():
        numbers.update(zip(indices, torch.stack([sums[index] for index in indices]).tolist(), strict=True))
    return [(_part_of(p, p), name, numbers[index]) for index, (name, p, _) in enumerate(named)]


def _sum_of_bits(tensor: Tensor) -> Tensor:
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return plain.contiguous().view(_WIDTHS[plain.element_size()]).sum(dtype=torch.int64)


def of_optimizer(optimizer: Optimizer, label: str, names: Mapping[Any, str]) -> Iterator[Fingerprint]:
    """Take the fingerprints of an optimizer's learning rates and states.

    Args:
        optimizer: The optimizer.
        label: Its name, another one for each optimizer of a run.
        names: The names of the parameters.
    """
    for number, group in enumerate(optimizer.param_groups):
        yield "options", f"lr of group {number} of {label}", _number(group.get("lr"))
    known = [(names[p], p, state) for p, state in optimizer.state.items() if p in names]
    # ZeRO-1: each rank has the states of its own parameters, and nobody else has them.
    owned = label, hash_of_names(name for name, _, _ in known)
    for name, parameter, state in known:
        for key, value in state.items():
            if isinstance(value, Tensor | int | float):
                like = value if isinstance(value, DTensor) else parameter
                yield (owned, _part_of(like, parameter)), f"{key} of {name} in {label}", _number(value)


def hash_of_names(names: Iterable[str]) -> int:
    """A number made from `names`, the same in every process."""
    return zlib.crc32("\n".join(names).encode())


def of_batch(batch: object) -> list[tuple[tuple[int, ...], str, int]]:
    """Take the fingerprints of the plain tensors in a batch.

    Args:
        batch: Any structure that torch knows; what else is in it, such as names of files, does not count.

    Returns:
        Shape and dtype of each, and a number made from its bytes.
    """
    plain = (each for each in tree_leaves(batch) if type(each) is Tensor and each.layout is torch.strided)
    return [(tuple(each.shape), str(each.dtype), _number(each)) for each in plain if not each.is_nested]


def differing(own: list[Fingerprint]) -> Partings:
    """Compare the fingerprints of all ranks; empty if all agree. A collective.

    Ranks first compare one number for each group, and their lists only where these differ.
    """
    together: dict[Hashable, int] = {}
    for group, name, number in own:
        together[group] = zlib.crc32(f"{name} {number}".encode(), together.get(group, 0))
    groups = {name for name, _ in _unequal(together)}
    if not groups:
        return {}
    detailed = {(group, name): number for group, name, number in own if group in groups}
    found: Partings = {}
    for (_, name), ranks in _unequal(detailed):
        found.setdefault(name, []).append(ranks)
    return found


def where_in_words(found: Partings) -> tuple[str, str, str]:
    """The first value that differs, the ranks between which it does, and the others, in words.

    Args:
        found: As `differing` returns it, not empty.
    """
    name, (ranks, *_) = next(iter(found.items()))
    groups = " and ".join(f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each))}" for each in ranks)
    others = [each for each in found if each != name]
    also = f", and so do {', '.join(others[:_MOST_NAMED])}" if others else ""
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return name, groups, also + more


def parted_in_words(found: Partings, step: int, agreed: int | None) -> str:
    """The words for ranks that have parted.

    Args:
        found: As `differing` returns it, not empty.
        step: The number of steps behind which they differ.
        agreed: That behind which they were equal last; ``None`` if nobody has looked.
    """
    name, groups, others = where_in_words(found)
    when = f"before the first step of this fit (global_step={step})" if agreed is None else f"after step {step}"
    since = "" if agreed is None else f" (they were equal after step {agreed})"
    trusted = f". Nothing later than step {agreed} is to be trusted: resume from a checkpoint of that step or before"
    return (
        f"{when}, {name} differs between {groups}{others}, though these ranks must hold equal values{since}. A "
        "rank has done something by itself: look for code that draws random numbers, writes weights or skips "
        f"something on some ranks only, such as below `if self.global_rank == 0`{'' if agreed is None else trusted}"
    )


def _unequal(own: Mapping[Any, int]) -> list[tuple[Any, list[list[int]]]]:
    """The keys under which ranks have different numbers, and the ranks by number. A collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    by_key: dict[Any, dict[int, list[int]]] = {}
    for rank, each in enumerate(found):
        for key, number in each.items():
            by_key.setdefault(key, {}).setdefault(number, []).append(rank)
    return [(key, list(ranks.values())) for key, ranks in by_key.items() if len(ranks) > 1]


def _part_of(tensor: Tensor, parameter: Tensor) -> Hashable:
    """The part of the whole that this rank holds of `tensor`, and the stages that hold `parameter`."""
    owners = stage_owners_of(parameter)
    stages = owners.ranks if owners is not None else None
    if not isinstance(tensor, DTensor):
        return stages, ()
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    assert coordinate is not None
    split = (dim for dim, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate))
    return stages, tuple((names[dim], coordinate[dim]) for dim in split)


def _number(value: Any) -> int:
    if not isinstance(value, Tensor):
        return zlib.crc32(repr(value).encode())
    local = local_of(value.detach()).cpu().contiguous().reshape(-1)
    return zlib.crc32(local.view(torch.uint8).numpy().data)
