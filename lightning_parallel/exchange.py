"""Collectives with a backward, over ranks that share a sequence. Layer 1.

A whole tensor is equal on all of them; a part is one rank's own. Gradients of parts are those of this rank's part of
the loss times the number of ranks, because what is averaged over the ranks afterwards is the sum of the parts there,
and the whole, equal on all, outside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def split(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of `whole` along `dim`, `local` entries, padded with zeros."""
    part: Tensor = _Split.apply(whole, dim, local, group)
    return part


def gather(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim` as one tensor of `length` entries, without padding. An all-gather."""
    whole: Tensor = _Gather.apply(part, dim, length, group)
    return whole


def exchange(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """A part along dimension `gather` for a part along dimension `scatter`. An all-to-all."""
    result: Tensor = _Exchange.apply(states, scatter, gather, group)
    return result


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
        context.dim, context.length, context.group = dim, whole.shape[dim], group
        begin = min(group.rank() * local, context.length)
        part = whole.narrow(dim, begin, max(0, min(local, context.length - begin)))
        return _padded(part, dim, local).contiguous()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        whole = _gathered(gradients[0], context.dim, context.length, context.group)
        return whole / context.group.size(), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
        context.dim, context.local, context.group = dim, part.shape[dim], group
        return _gathered(part, dim, length, group)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        part = _Split.forward(_Unused(), gradients[0], context.dim, context.local, context.group)
        return part * context.group.size(), None, None, None


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


class _Unused:
    """Takes what a function would keep for its backward."""


def _gathered(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    whole = torch.cat(parts, dim)
    return whole if whole.shape[dim] == length else whole.narrow(dim, 0, length).contiguous()


def _padded(part: Tensor, dim: int, length: int) -> Tensor:
    missing = length - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)
