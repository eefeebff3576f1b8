"""Collectives with a backward, over ranks that share a matrix product. Layer 1.

A whole tensor is equal on all of them; a part is one rank's own; a summand is what the ranks have to add up. Nothing is
averaged over these ranks afterwards, so gradients are those of the loss.
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
from lightning_parallel.ranks.collectives import PartOfWhole, Rejoin, gathered, scattered


@_torch.modes.not_compiled
def enter(whole: Tensor, group: ProcessGroup) -> Tensor:
    """`whole` itself, where each rank goes on with another part: gradients are added up. Backward is an all-reduce."""
    same: Tensor = _Enter.apply(whole, group)
    return same


@_torch.modes.not_compiled
def leave(summand: Tensor, group: ProcessGroup) -> Tensor:
    """The sum over the ranks. An all-reduce."""
    whole: Tensor = _Leave.apply(summand, group)
    return whole


def chunk(whole: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """This rank's of equal parts of `whole`. Backward is an all-gather."""
    return part_of_whole(whole, dim, whole.shape[dim] // group.size(), group)


def collect(part: Tensor, dim: int, group: ProcessGroup) -> Tensor:
    """Equal parts of all ranks as one tensor, with which each goes on in its own way: backward is a reduce-scatter."""
    return whole_of_parts(part, dim, part.shape[dim] * group.size(), group)


@_torch.modes.not_compiled
def contiguous_backward(part: Tensor) -> Tensor:
    """`part` itself; its gradient is made contiguous, as DTensors take its strides for those of `part`."""
    same: Tensor = _ContiguousBackward.apply(part)
    return same


@_torch.modes.not_compiled
def part_of_whole(whole: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of `whole`, `local` entries, padded with zeros. Backward is an all-gather."""
    part: Tensor = PartOfWhole.apply(whole, dim, local, group)
    return part


@_torch.modes.not_compiled
def rejoin(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """The parts of all ranks as one tensor without padding, with which all go on alike. An all-gather."""
    whole: Tensor = Rejoin.apply(part, dim, length, group)
    return whole


@_torch.modes.not_compiled
def whole_of_parts(part: Tensor, dim: int, length: int, group: ProcessGroup) -> Tensor:
    """As `rejoin`, but each rank goes on in its own way: backward is a reduce-scatter."""
    whole: Tensor = _WholeOfParts.apply(part, dim, length, group)
    return whole


@_torch.modes.not_compiled
def add_parts(summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
    """This rank's part of the sum over the ranks, `local` entries. A reduce-scatter; backward is an all-gather."""
    part: Tensor = _AddParts.apply(summand, dim, local, group)
    return part


@_torch.modes.not_compiled
def enter_all(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """`enter` for several tensors, whose gradients travel together: one all-reduce for each dtype."""
    return list(_EnterAll.apply(group, *tensors)) if tensors else []


@_torch.modes.not_compiled
def shared_gradient(whole: Tensor, group: ProcessGroup) -> Tensor:
    """`whole` itself, whose gradient is equal on all ranks, as if each had an equal part in it."""
    same: Tensor = _SharedGradient.apply(whole, group.size())
    return same


@_torch.modes.not_compiled
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


class _WholeOfParts(Rejoin):
    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return scattered(gradients[0], context.dim, context.local, context.group), None, None, None


class _AddParts(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, summand: Tensor, dim: int, local: int, group: ProcessGroup) -> Tensor:
        context.dim, context.length, context.group = dim, summand.shape[dim], group
        return scattered(summand, dim, local, group)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        return gathered(gradients[0], context.dim, context.length, context.group), None, None, None


def _summed(summand: Tensor, group: ProcessGroup) -> Tensor:
    total = summand.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total
