"""Collectives with a backward, by Megatron-LM's names.

Each is a pair of primitives, one for the forward and one for the backward: the identity, `part_of`, `all_reduced`,
`gathered`, `scattered` or `exchanged`. Whole tensors are equal on all ranks; a part, or a summand, is a rank's own.

Without `scale`, gradients are those of the loss, as tensor parallel needs: it averages nothing over these ranks
afterwards. Context parallel averages gradients of parameters over its ranks, so the loss has to count once for each
rank. There `scale` is the number of ranks where parts are joined, and one over it where a whole tensor is split.
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
        whole: `[...]`, equal on all ranks, each of which computes something else with it.
        group: The ranks.
        scale: Factor of the gradient.
    """
    return paired(whole, alias, partial(all_reduced, group=group), scale=scale)


@_torch.modes.not_compiled
def copy_all_to(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """`copy_to` for several tensors, whose gradients are reduced together: one all-reduce for each dtype.

    Args:
        tensors: Each `[...]`, equal on all ranks.
        group: The ranks.
    """
    return list(_CopyAll.apply(group, *tensors)) if tensors else []


@_torch.modes.not_compiled
def reduce_from(summand: Tensor, group: ProcessGroup) -> Tensor:
    """All-reduce forward, identity backward (Megatron's g): the sum `[...]`, equal on all ranks.

    Args:
        summand: `[...]`, this rank's term of the sum.
        group: The ranks.
    """
    return paired(summand, partial(all_reduced, group=group), _unchanged)


@_torch.modes.not_compiled
def scatter_to(whole: Tensor, dim: int, group: ProcessGroup, *, local: int | None = None, scale: float = 1.0) -> Tensor:
    """This rank's part forward, all-gather backward.

    Args:
        whole: `[..., length, ...]`, equal on all ranks.
        dim: The dimension of `length`.
        group: The ranks.
        local: Entries of each part, those of the last ranks padded with zeros; by default `length / ranks`.
        scale: Factor of the gradient.

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
    """All-gather forward, this rank's part backward; correct where all ranks compute the same with the result.

    Args:
        part: `[..., local, ...]`, this rank's.
        dim: The dimension of `local`.
        group: The ranks.
        length: Number of entries without padding; by default there is none.
        scale: Factor of the gradient.

    Returns:
        `[..., length, ...]`, equal on all ranks.
    """
    forward = partial(gathered, dim=dim, length=_length(part, dim, group, length), group=group)
    return paired(part, forward, partial(part_of, dim=dim, local=part.shape[dim], group=group), scale=scale)


@_torch.modes.not_compiled
def gather_from_sequence(part: Tensor, dim: int, group: ProcessGroup, *, length: int | None = None) -> Tensor:
    """All-gather forward, reduce-scatter backward; for `gather_from` where ranks compute different things with it.

    Args:
        part: `[..., local, ...]`, this rank's.
        dim: The dimension of `local`.
        group: The ranks.
        length: Number of entries without padding; by default there is none.
    """
    forward = partial(gathered, dim=dim, length=_length(part, dim, group, length), group=group)
    return paired(part, forward, partial(scattered, dim=dim, local=part.shape[dim], group=group))


@_torch.modes.not_compiled
def reduce_scatter_to_sequence(summand: Tensor, dim: int, group: ProcessGroup, *, local: int) -> Tensor:
    """Reduce-scatter forward, all-gather backward.

    Args:
        summand: `[..., length, ...]`, this rank's term of the sum.
        dim: The dimension of `length`.
        group: The ranks.
        local: Entries of each part, those of the last ranks padded with zeros.

    Returns:
        `[..., local, ...]`: this rank's part of the sum.
    """
    forward = partial(scattered, dim=dim, local=local, group=group)
    return paired(summand, forward, partial(gathered, dim=dim, length=summand.shape[dim], group=group))


@_torch.modes.not_compiled
def all_to_all(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """All-to-all both ways: exchange a part along dimension `gather` for a part along dimension `scatter`.

    Args:
        states: Whole along `scatter`, whose size the number of ranks divides, and a part along `gather`.
        scatter: The dimension that is split.
        gather: The dimension that is joined.
        group: The ranks.

    Returns:
        `[batch, length, heads / ranks, width]` for `[batch, length / ranks, heads, width]`, for example.
    """
    forward = partial(exchanged, scatter=scatter, gather=gather, group=group)
    return paired(states, forward, partial(exchanged, scatter=gather, gather=scatter, group=group))


def stacked(own: Tensor, group: ProcessGroup) -> Tensor:
    """Stack the tensors of all ranks as `[ranks, ...]`: all-gather forward, reduce-scatter backward.

    Args:
        own: `[...]`, this rank's.
        group: The ranks.
    """
    return gather_from_sequence(own[None], 0, group)


@_torch.modes.not_compiled
def share_gradient(whole: Tensor, group: ProcessGroup) -> Tensor:
    """Identity forward, division by the ranks backward, where complete gradients of all ranks will be added up.

    Args:
        whole: `[...]`, equal on all ranks.
        group: The ranks.
    """
    return paired(whole, alias, _unchanged, scale=1 / group.size())


# How they are made ---------------------------------------------------------------------------------------------------


def paired(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor], *, scale: float = 1.0
) -> Tensor:
    """``forward(tensor)``, whose gradient is ``scale * backward(gradient)``.

    Args:
        tensor: `[...]`.
        forward: Returns another tensor object, never its argument; it and `backward` are each other's transpose.
        backward: Maps a gradient of the result to one of `tensor`.
        scale: Factor of the gradient.
    """
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
        # The two are each other's transpose, so the gradient of this gradient is the forward. It takes no `scale`:
        # gradients of gradients count once for each rank as well.
        back = _Paired.apply(gradient, backward, forward) if gradient.requires_grad else backward(gradient)
        return back, None, None


def _scaled(backward: Callable[[Tensor], Tensor], scale: float, gradient: Tensor) -> Tensor:
    result = backward(gradient)
    return result if scale == 1 else result * scale


class _CopyAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> Any:
        ctx.group = group
        # A tensor that was not used has no gradient on any rank, as all compute alike: nothing to reduce.
        ctx.set_materialize_grads(False)
        return tuple(alias(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        summed = iter(all_reduced_together([g for g in gradients if g is not None], ctx.group))
        return None, *(None if gradient is None else next(summed) for gradient in gradients)


# Primitives, without a backward --------------------------------------------------------------------------------------


def alias(tensor: Tensor) -> Tensor:
    """`tensor` as another object of the same memory: autograd functions may not return their own arguments."""
    return tensor.view_as(tensor)


def _unchanged(gradient: Tensor) -> Tensor:
    return gradient


def part_of(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part `[..., local, ...]` of `whole`, padded with zeros and contiguous.

    Args:
        whole: `[..., length, ...]`, equal on all ranks.
        dim: The dimension of `length`.
        local: Entries of each part.
        group: The ranks.
    """
    length = whole.shape[dim]
    begin = min(group.rank() * local, length)
    return padded(whole.narrow(dim, begin, max(0, min(local, length - begin))), dim, local).contiguous()


def all_reduced(summand: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks; `summand` itself is not changed.

    Args:
        summand: `[...]`, this rank's term.
        group: The ranks.
    """
    # A copy, because the collective works in place; contiguous, because backends take nothing else.
    total = summand.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def all_reduced_together(tensors: Sequence[Tensor], group: ProcessGroup, *, divisor: int = 1) -> list[Tensor]:
    """The sums over the ranks of several tensors, with one all-reduce for each dtype.

    Args:
        tensors: Each `[...]`, in the same order on all ranks.
        group: The ranks.
        divisor: By which the tensors are divided before, so that a mean does not overflow in 16 bits.
    """
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
    """This rank's part `[..., local, ...]` of the sum over the ranks.

    Args:
        summand: `[..., length, ...]`, this rank's term.
        dim: The dimension of `length`.
        local: Entries of each part.
        group: The ranks.
    """
    size = group.size()
    # The collective splits the first dimension, so the parts of the ranks are put one behind the other there.
    parts = torch.cat(padded(summand, dim, local * size).chunk(size, dim)).contiguous()
    part = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    _torch.groups.reduce_scatter(part, parts, group)
    return part


def gathered(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks joined as `[..., length, ...]`, without padding.

    Args:
        part: `[..., local, ...]`, this rank's.
        dim: The dimension of `local`.
        length: Number of entries without padding.
        group: The ranks.
    """
    sent = _torch.dense_parts.travelling(part.contiguous())
    parts = sent.new_empty((group.size(), len(sent)))
    dist.all_gather(list(parts), sent, group=group)
    parts = parts.view(part.dtype).view(group.size(), *part.shape)
    whole = parts.flatten(0, 1) if dim == 0 else torch.cat(list(parts), dim)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).contiguous()


def exchanged(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """This rank's part along `scatter` of the tensors of all ranks, joined along `gather`.

    Args:
        states: As of `all_to_all`.
        scatter: The dimension that is split.
        gather: The dimension that is joined.
        group: The ranks.
    """
    parts = torch.stack(states.chunk(group.size(), scatter)).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return torch.cat(list(received), gather)


def padded(part: Tensor, dim: int, length: int) -> Tensor:
    """`part` with zeros at its end, `[..., length, ...]`; `part` itself where nothing is missing.

    Args:
        part: `[..., local, ...]`.
        dim: The dimension of `local`.
        length: Entries with the zeros.
    """
    missing = length - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)


def _length(part: Tensor, dim: int, group: ProcessGroup, length: int | None) -> int:
    return part.shape[dim] * group.size() if length is None else length
