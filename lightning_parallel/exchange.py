"""Collectives with a backward, over ranks that share a sequence or a matrix product. Layer 1.

A whole tensor is equal on all of them; a part is one rank's own; a summand is what the ranks have to add up.

Context parallel (`split`, `gather`, `exchange`): gradients of parts are those of this rank's part of the loss times the
number of ranks, because what is averaged over the ranks afterwards is the sum of the parts there, and the whole, equal
on all, outside. Tensor parallel (the others): nothing is averaged over the ranks, so gradients are those of the loss.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel import _torch


@_torch.not_compiled
def split(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of `whole` along `dim`, `local` entries, padded with zeros."""
    part: Tensor = _Split.apply(whole, dim, local, group)
    return part


@_torch.not_compiled
def gather(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks along `dim` as one tensor of `length` entries, without padding. An all-gather."""
    whole: Tensor = _Gather.apply(part, dim, length, group)
    return whole


@_torch.not_compiled
def exchange(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """A part along dimension `gather` for a part along dimension `scatter`. An all-to-all."""
    result: Tensor = _Exchange.apply(states, scatter, gather, group)
    return result


@_torch.not_compiled
def enter(whole: Tensor, group: ProcessGroup) -> Tensor:
    """`whole` itself, where each rank goes on with another part: gradients are added up. Backward is an all-reduce."""
    same: Tensor = _Enter.apply(whole, group)
    return same


@_torch.not_compiled
def leave(summand: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks. An all-reduce."""
    whole: Tensor = _Leave.apply(summand, group)
    return whole


@_torch.not_compiled
def chunk(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's of equal parts of `whole`. Backward is an all-gather."""
    part: Tensor = _Chunk.apply(whole, dim, group)
    return part


@_torch.not_compiled
def collect(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Equal parts of all ranks as one tensor, with which each goes on in its own way: backward is a reduce-scatter."""
    whole: Tensor = _Collect.apply(part, dim, group)
    return whole


@_torch.not_compiled
def contiguous_backward(part: Tensor) -> Tensor:
    """`part` itself; its gradient is made contiguous, as DTensors take its strides for those of `part`."""
    same: Tensor = _ContiguousBackward.apply(part)
    return same


@_torch.not_compiled
def part_of_whole(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of `whole`, `local` entries, padded with zeros. Backward is an all-gather."""
    part: Tensor = _PartOfWhole.apply(whole, dim, local, group)
    return part


@_torch.not_compiled
def rejoin(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks as one tensor without padding, with which all go on alike. An all-gather."""
    whole: Tensor = _Rejoin.apply(part, dim, length, group)
    return whole


@_torch.not_compiled
def whole_of_parts(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """As `rejoin`, but each rank goes on in its own way: backward is a reduce-scatter."""
    whole: Tensor = _WholeOfParts.apply(part, dim, length, group)
    return whole


@_torch.not_compiled
def add_parts(summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over the ranks, `local` entries. A reduce-scatter; backward is an all-gather."""
    part: Tensor = _AddParts.apply(summand, dim, local, group)
    return part


@_torch.not_compiled
def enter_all(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """`enter` for several tensors, whose gradients travel together: one all-reduce for each dtype."""
    return list(_EnterAll.apply(group, *tensors)) if tensors else []


@_torch.not_compiled
def shared_gradient(whole: Tensor, group: ProcessGroup) -> Tensor:
    """`whole` itself, whose gradient is equal on all ranks, as if each had an equal part in it."""
    same: Tensor = _SharedGradient.apply(whole, group.size())
    return same


@_torch.not_compiled
def as_summand(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """`whole` as a DTensor; its gradient is what this rank adds to the whole one."""
    same: Tensor = _AsSummand.apply(whole, mesh)
    return same


class _SharedGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, size: int) -> Tensor:
        context.size = size
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0] / context.size, None


class _AsSummand(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(whole.view_as(whole), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        if gradient.placements[0].is_partial():
            return gradient.to_local(), None
        return gradient.full_tensor() / gradient.device_mesh.size(), None


class _EnterAll(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, group: ProcessGroup, *tensors: Tensor) -> Any:
        context.group = group
        context.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        summed: list[Any] = list(gradients)
        by_dtype: dict[torch.dtype, list[int]] = defaultdict(list)
        for index, gradient in enumerate(gradients):
            if gradient is not None:
                by_dtype[gradient.dtype].append(index)
        for indices in by_dtype.values():
            flat = torch.cat([gradients[index].reshape(-1) for index in indices])
            dist.all_reduce(flat, group=context.group)
            for index, total in zip(indices, flat.split([gradients[i].numel() for i in indices]), strict=True):
                summed[index] = total.view_as(gradients[index])
        return None, *summed


class _ContiguousBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor) -> Tensor:
        return part.view_as(part)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0].contiguous()


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, group: ProcessGroup) -> Tensor:
        context.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _summed(gradients[0], context.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, summand: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(summand, group)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        context.dim, context.length, context.group = dim, whole.shape[dim], group
        return whole.chunk(group.size(), dim)[group.rank()].contiguous()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _gathered(gradients[0], context.dim, context.length, context.group), None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        context.dim, context.local, context.group = dim, part.shape[dim], group
        return _gathered(part, dim, part.shape[dim] * group.size(), group)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _scattered(gradients[0], context.dim, context.local, context.group), None, None


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


class _PartOfWhole(_Split):
    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _gathered(gradients[0], context.dim, context.length, context.group), None, None, None


class _Rejoin(_Gather):
    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _Split.forward(_Unused(), gradients[0], context.dim, context.local, context.group), None, None, None


class _WholeOfParts(_Gather):
    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _scattered(gradients[0], context.dim, context.local, context.group), None, None, None


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
        context.dim, context.length, context.group = dim, summand.shape[dim], group
        return _scattered(summand, dim, local, group)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return _gathered(gradients[0], context.dim, context.length, context.group), None, None, None


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


def _summed(summand: Tensor, group: ProcessGroup) -> Tensor:
    total = summand.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _scattered(summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum, along `dim`."""
    size = group.size()
    parts = torch.cat(_padded(summand, dim, local * size).chunk(size, dim)).contiguous()
    part = parts.new_empty(parts.shape[0] // size, *parts.shape[1:])
    _torch.reduce_scatter(part, parts, group)
    return part


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
