"""Collectives with a backward, by Megatron-LM's names.

Each is a pair of primitives, one for the forward and one for the backward: the identity, `part_of`, `all_reduced`,
`gathered`, `scattered` or `exchanged`. A whole tensor is equal on all ranks of a group; a part is one rank's own; a
summand is what the ranks have to add up.

Gradients are those of the loss where nothing is averaged over these ranks afterwards (tensor parallel). Where gradients
of parameters are averaged over them (context parallel), every part of the loss has to count as often as there are
ranks: `scale` multiplies gradients on their way between what is whole and the parts, by the number of ranks where parts
are joined, and by one over it where a whole is split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel import _torch


@_torch.modes.not_compiled
def copy_to(whole: Tensor, group: ProcessGroup, *, scale: float = 1.0) -> Tensor:
    """Identity forward, all-reduce backward (Megatron's f).

    Args:
        whole: Equal on all ranks, of which each goes on with it in its own way.
        group: The ranks.
        scale: Multiplies the gradient.
    """
    return paired(whole, alias, partial(all_reduced, group=group), scale=scale)


@_torch.modes.not_compiled
def copy_all_to(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """`copy_to` for several tensors, whose gradients travel together: one all-reduce for each dtype."""
    return list(_CopyAll.apply(group, *tensors)) if tensors else []


@_torch.modes.not_compiled
def reduce_from(summand: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce forward, identity backward (Megatron's g)."""
    return paired(summand, partial(all_reduced, group=group), _unchanged)


@_torch.modes.not_compiled
def scatter_to(whole: Tensor, dim: int, group: ProcessGroup, *, local: int | None = None, scale: float = 1.0) -> Tensor:
    """This rank's part forward, all-gather backward.

    Args:
        whole: `[..., length, ...]`, equal on all ranks.
        dim: The dimension of `length`.
        group: The ranks.
        local: How many entries a part has, the last ones padded with zeros; by default all have equal parts.
        scale: Multiplies the gradient.

    Returns:
        `[..., local, ...]`.
    """
    length = whole.shape[dim]
    forward = partial(part_of, dim=dim, local=length // group.size() if local is None else local, group=group)
    return paired(whole, forward, partial(gathered, dim=dim, length=length, group=group), scale=scale)


@_torch.modes.not_compiled
def gather_from(
    part: Tensor, dim: int, group: ProcessGroup, *, length: int | None = None, scale: float = 1.0
) -> Tensor:
    """All-gather forward, this rank's part backward: all ranks go on alike.

    Args:
        part: `[..., local, ...]`, this rank's.
        dim: The dimension of `local`.
        group: The ranks.
        length: How many entries there are without padding; by default all.
        scale: Multiplies the gradient.

    Returns:
        `[..., length, ...]`, equal on all ranks.
    """
    forward = partial(gathered, dim=dim, length=_length(part, dim, group, length), group=group)
    return paired(part, forward, partial(part_of, dim=dim, local=part.shape[dim], group=group), scale=scale)


@_torch.modes.not_compiled
def gather_from_sequence(part: Tensor, dim: int, group: ProcessGroup, *, length: int | None = None) -> Tensor:
    """All-gather forward, reduce-scatter backward: as `gather_from`, but each rank goes on in its own way."""
    forward = partial(gathered, dim=dim, length=_length(part, dim, group, length), group=group)
    return paired(part, forward, partial(scattered, dim=dim, local=part.shape[dim], group=group))


@_torch.modes.not_compiled
def reduce_scatter_to_sequence(summand: Tensor, dim: int, group: ProcessGroup, *, local: int) -> Tensor:
    """Reduce-scatter forward, all-gather backward.

    Args:
        summand: `[..., length, ...]`, to be added up over the ranks.
        dim: The dimension of `length`.
        group: The ranks.
        local: How many entries a part has, the last ones padded with zeros.

    Returns:
        `[..., local, ...]`: this rank's part of the sum.
    """
    forward = partial(scattered, dim=dim, local=local, group=group)
    return paired(summand, forward, partial(gathered, dim=dim, length=summand.shape[dim], group=group))


@_torch.modes.not_compiled
def all_to_all(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """All-to-all both ways: a part along dimension `gather` for a part along dimension `scatter`.

    Args:
        states: Whole along `scatter`, whose size the ranks divide, and a part along `gather`.
        scatter: The dimension that is split.
        gather: The dimension that is joined.
        group: The ranks.
    """
    forward = partial(exchanged, scatter=scatter, gather=gather, group=group)
    return paired(states, forward, partial(exchanged, scatter=gather, gather=scatter, group=group))


def stacked(own: Tensor, group: ProcessGroup) -> Tensor:
    """Tensors `[...]` of all ranks as `[ranks, ...]`: all-gather forward, reduce-scatter backward."""
    return gather_from_sequence(own[None], 0, group)


@_torch.modes.not_compiled
def share_gradient(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward; backward divides by the number of ranks, as if each had an equal part in the gradient."""
    return paired(whole, alias, _unchanged, scale=1 / group.size())


# How they are made ---------------------------------------------------------------------------------------------------


def paired(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor], *, scale: float = 1.0
) -> Tensor:
    """``forward(tensor)``, whose gradient is ``scale * backward(gradient)``."""
    result: Tensor = _Paired.apply(tensor, forward, partial(_scaled, backward, scale))
    return result


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.pair = forward, backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        forward, backward = ctx.pair
        gradient = gradients[0]
        # What a gradient of this gradient takes is the forward: it, too, counts each part as often as there are ranks.
        back = _Paired.apply(gradient, backward, forward) if gradient.requires_grad else backward(gradient)
        return back, None, None


def _scaled(backward: Callable[[Tensor], Tensor], scale: float, gradient: Tensor) -> Tensor:
    result = backward(gradient)
    return result if scale == 1 else result * scale


class _CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(alias(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed = iter(all_reduced_together([g for g in gradients if g is not None], ctx.group))
        return None, *(None if gradient is None else next(summed) for gradient in gradients)


# Primitives, without a backward --------------------------------------------------------------------------------------


def alias(tensor: Tensor) -> Tensor:
    """`tensor` as another object: autograd functions may not return what they are given."""
    return tensor.view_as(tensor)


def _unchanged(gradient: Tensor) -> Tensor:
    return gradient


def part_of(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's `local` entries of `whole` along `dim`, padded with zeros; a copy."""
    length = whole.shape[dim]
    begin = min(group.rank() * local, length)
    return padded(whole.narrow(dim, begin, max(0, min(local, length - begin))), dim, local).contiguous()


def all_reduced(summand: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks."""
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_reduced_together(tensors: Sequence[Tensor], group: ProcessGroup, *, divisor: int = 1) -> list[Tensor]:
    """The sums over the ranks of tensors that are divided by `divisor` before: one all-reduce for each dtype."""
    sums: list[Tensor] = list(tensors)
    by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(index)
    for indices in by_dtype.values():
        flat = torch.cat([tensors[index].reshape(-1) for index in indices])
        if divisor != 1:
            flat.div_(divisor)
        dist.all_reduce(flat, group=group)
        for index, total in zip(indices, flat.split([tensors[i].numel() for i in indices]), strict=True):
            sums[index] = total.view_as(tensors[index])
    return sums


def scattered(summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over the ranks, `local` entries along `dim`."""
    size = group.size()
    parts = torch.cat(padded(summand, dim, local * size).chunk(size, dim)).contiguous()
    part = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    _torch.groups.reduce_scatter(part, parts, group)
    return part


def gathered(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim`, `length` entries without padding."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    whole = torch.cat(parts, dim)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).contiguous()


def exchanged(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """This rank's part along `scatter` of what the ranks hold, joined along `gather`."""
    parts = torch.stack(states.chunk(group.size(), scatter)).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(list(received), gather)


def padded(part: Tensor, dim: int, length: int) -> Tensor:
    """`part` with zeros at the end of `dim`, up to `length` entries."""
    missing = length - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)


def _length(part: Tensor, dim: int, group: ProcessGroup, length: int | None) -> int:
    return part.shape[dim] * group.size() if length is None else length
