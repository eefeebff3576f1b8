"""Collectives with a backward, over ranks that share a sequence. Layer 1.

A whole tensor is equal on all of them; a part is one rank's own. Gradients are averaged over the ranks afterwards: that
is the sum over the parts inside, and the whole, equal on all, outside. So gradients of parts are those of this rank's
part of the loss times the number of ranks. (`PartOfWhole` and `Rejoin` have gradients of the loss itself.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_parallel import _torch


@_torch.modes.not_compiled
def split(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of `whole` along `dim`, `local` entries, padded with zeros."""
    part: Tensor = _Split.apply(whole, dim, local, group)
    return part


@_torch.modes.not_compiled
def gather(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim` as one tensor of `length` entries, without padding. An all-gather."""
    whole: Tensor = _Gather.apply(part, dim, length, group)
    return whole


@_torch.modes.not_compiled
def exchange(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """A part along dimension `gather` for a part along dimension `scatter`. An all-to-all."""
    result: Tensor = _Exchange.apply(states, scatter, gather, group)
    return result


@_torch.modes.not_compiled
def same(whole: Tensor, group: ProcessGroup) -> Tensor:
    """`whole`, of which each rank uses something else; backward averages over the ranks, an all-reduce."""
    result: Tensor = _Same.apply(whole, group)
    return result


def stacked(own: Tensor, group: ProcessGroup) -> Tensor:
    """The tensors of all ranks, which are of one shape, along a new first dimension. An all-gather."""
    together: Tensor = _Stack.apply(own, group)
    return together


class PartOfWhole(torch.autograd.Function):
    """This rank's part of a tensor that is equal on all. Backward is an all-gather."""

    @staticmethod
    @override
    def forward(context: Any, whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
        context.dim, context.length, context.group = dim, whole.shape[dim], group
        return part_of(whole, dim, local, group)

    @staticmethod
    @override
    def backward(context: Any, *gradients: Any) -> Any:
        return gathered(gradients[0], context.dim, context.length, context.group), None, None, None


class Rejoin(torch.autograd.Function):
    """The parts of all ranks as one tensor, with which all go on alike. An all-gather; backward is local."""

    @staticmethod
    @override
    def forward(context: Any, part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
        context.dim, context.local, context.group = dim, part.shape[dim], group
        return gathered(part, dim, length, group)

    @staticmethod
    @override
    def backward(context: Any, *gradients: Any) -> Any:
        return part_of(gradients[0], context.dim, context.local, context.group), None, None, None


class _Split(PartOfWhole):
    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        whole, *others = PartOfWhole.backward(context, *gradients)
        return whole / context.group.size(), *others


class _Gather(Rejoin):
    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        part, *others = Rejoin.backward(context, *gradients)
        return part * context.group.size(), *others


class _Stack(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, own: Tensor, group: ProcessGroup) -> Tensor:
        context.group = group
        return gathered(own[None], 0, group.size(), group)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return scattered(gradients[0], 0, 1, context.group)[0], None


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        context.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=context.group)
        return gradient / context.group.size(), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
        context.dims, context.group = (scatter, gather), group
        parts = torch.stack(states.chunk(group.size(), scatter)).contiguous()
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(list(received), gather)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        scatter, gather = context.dims
        return _Exchange.apply(gradients[0], gather, scatter, context.group), None, None, None


def part_of(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's `local` entries of `whole` along `dim`, padded with zeros; a copy."""
    length = whole.shape[dim]
    begin = min(group.rank() * local, length)
    return padded(whole.narrow(dim, begin, max(0, min(local, length - begin))), dim, local).contiguous()


def scattered(summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum, along `dim`."""
    size = group.size()
    parts = torch.cat(padded(summand, dim, local * size).chunk(size, dim)).contiguous()
    part = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    _torch.groups.reduce_scatter(part, parts, group)
    return part


def gathered(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim`, without padding."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    whole = torch.cat(parts, dim)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).contiguous()


def padded(part: Tensor, dim: int, length: int) -> Tensor:
    """`part` with zeros at the end of `dim`, up to `length` entries."""
    missing = length - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)
