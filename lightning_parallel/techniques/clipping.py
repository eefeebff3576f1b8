"""Clip gradients by norm or value over all ranks, sharded and whole parameters together."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.ranks.stage_owners import StageOwners, stage_owners_of

_Axes = tuple[DeviceMesh | None, tuple[int, ...]]


@torch.no_grad()
def gradient_norm(parameters: Iterable[nn.Parameter], norm_type: float = 2.0) -> Tensor:
    """Compute the norm of all gradients over all ranks; a collective.

    Equals `torch.nn.utils.get_total_norm` of one process, and works on local shards because that function takes no
    mixture of tensors and DTensors. Communicates one number: once for each axis of each set of axes over which
    parameters are sharded, and once over the stages of a pipeline.

    Args:
        parameters: Parameters, each counted once; those without a gradient are left out.
        norm_type: The order of the norm, also ``math.inf``.

    Returns:
        A scalar that is equal on all ranks.

    Example:
        >>> gradient_norm(module.parameters())
    """
    parameters = list(parameters)
    by_axes: dict[_Axes, list[Tensor]] = defaultdict(list)
    for gradient in _gradients(parameters, counted_here=True):
        by_axes[_sharded_axes(gradient)].append(local_of(gradient))
    powers = [_power(group, axes, norm_type) for axes, group in by_axes.items()]
    is_max = math.isinf(norm_type)
    total = torch.tensor(0.0)
    if powers:
        stacked = torch.stack([power.to(powers[0].device) for power in powers])
        total = stacked.max() if is_max else stacked.sum()
    if owners := next((h for h in map(stage_owners_of, parameters) if h is not None), None):
        total = _over_stages(total, owners, is_max=is_max)
    return total if is_max else total.pow(1.0 / norm_type)


@torch.no_grad()
def gradients_are_finite(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Whether the gradients that this rank has a part of have finite norms. No collective.

    Norms are in 32 bits at least: in 16, that of many elements is infinite where none of them is.

    Args:
        parameters: Parameters; those without a gradient are left out.

    Returns:
        A scalar of `torch.bool`, on the device of the gradients.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in _local_gradients(parameters):
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        by_kind[values.device, values.dtype].append(values)
    norms = [
        norm
        for (_, dtype), group in by_kind.items()
        for norm in torch._foreach_norm(group, 2, dtype=torch.promote_types(dtype, torch.float32))
    ]
    if not norms:
        return torch.tensor(True)
    return torch.stack([norm.to(norms[0].device, norms[0].dtype) for norm in norms]).isfinite().all()


@torch.no_grad()
def clip_gradients_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their total norm is at most `max_norm`.

    Equals `torch.nn.utils.clip_grad_norm_` of one process (Pascanu et al. 2013). A collective, as `gradient_norm`.

    Args:
        parameters: Parameters, each counted once; those without a gradient are left out.
        max_norm: The largest norm allowed.
        norm_type: The order of the norm, also ``math.inf``.

    Returns:
        The norm before, a scalar that is equal on all ranks.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, norm_type)
    if gradients := _local_gradients(parameters):
        torch.nn.utils.clip_grads_with_norm_(_holders(gradients), max_norm, norm.to(gradients[0].device))
    return norm


@torch.no_grad()
def clip_gradients_by_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clip each element of the gradients to ``[-max_value, max_value]``, in place. No collective.

    Equals `torch.nn.utils.clip_grad_value_` of one process, which takes no mixture of tensors and DTensors.

    Args:
        parameters: Parameters; those without a gradient are left out.
        max_value: The largest absolute value allowed.
    """
    if gradients := _local_gradients(parameters):
        torch.nn.utils.clip_grad_value_(_holders(gradients), max_value)


@torch.no_grad()
def scale_gradients(parameters: Iterable[nn.Parameter], factor: Tensor) -> None:
    """Multiply all gradients by `factor`, a number that is equal on all ranks, in place. No collective.

    Args:
        parameters: Parameters, each counted once; those without a gradient are left out.
        factor: A scalar.
    """
    gradients: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in _local_gradients(parameters):
        gradients[gradient.device, gradient.dtype].append(gradient)
    for (device, dtype), group in gradients.items():
        torch._foreach_mul_(group, factor.to(device, dtype))


def _gradients(parameters: Iterable[nn.Parameter], *, counted_here: bool = False) -> list[Tensor]:
    chosen = dict.fromkeys(parameters)
    # Weights tied across pipeline stages are held by several stages; only one of them may count their norm.
    if counted_here:
        chosen = {p: None for p in chosen if (owners := stage_owners_of(p)) is None or owners.counts_here}
    return [parameter.grad for parameter in chosen if parameter.grad is not None]


def _over_stages(total: Tensor, owners: StageOwners, *, is_max: bool) -> Tensor:
    """Sum a scalar (or take its maximum) over the stages of a pipeline. A collective."""
    # A stage without gradients has an fp32 zero on the host: all stages have to bring the same dtype and device.
    on_host = total.double().cpu()
    dist.all_reduce(on_host, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=owners.host_group)
    return on_host.to(total.device, total.dtype)


def _local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [local_of(gradient) for gradient in _gradients(parameters)]


def _power(gradients: list[Tensor], axes: _Axes, norm_type: float) -> Tensor:
    """Sum the powers of all elements (for the infinite norm, take the maximum) over the ranks that share them."""
    # A rank may have no row of a small parameter, and torch has no infinite norm of an empty tensor.
    norm = torch.nn.utils.get_total_norm([g for g in gradients if g.numel()], norm_type)
    is_max = math.isinf(norm_type)
    power = norm if is_max else norm.pow(norm_type)
    mesh, dims = axes
    for dim in dims:
        assert mesh is not None
        power = power.to(mesh.device_type)
        dist.all_reduce(power, op=dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=mesh.get_group(dim))
    return power


def _sharded_axes(gradient: Tensor) -> _Axes:
    if not isinstance(gradient, DTensor):
        return None, ()
    return gradient.device_mesh, tuple(
        dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate()
    )


def _holders(gradients: list[Tensor]) -> list[Tensor]:
    """Plain tensors whose `.grad` are the local gradients, in the form that torch's functions for scaling take."""
    holders = [gradient.detach() for gradient in gradients]  # of the same memory: nobody reads the holders themselves
    for holder, gradient in zip(holders, gradients, strict=True):
        holder.grad = gradient
    return holders
