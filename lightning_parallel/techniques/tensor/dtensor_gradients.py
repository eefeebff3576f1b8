"""Conversions between tensors and DTensors, with the gradients that each side needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel import _torch
from lightning_parallel.ranks.collectives import alias, paired


@_torch.modes.not_compiled
def contiguous_backward(part: Tensor) -> Tensor:
    """Identity forward; backward makes the gradient contiguous.

    DTensors assume that a gradient has the strides of `part`, and would read it wrongly otherwise.
    """
    return paired(part, alias, Tensor.contiguous)


@_torch.modes.not_compiled
def as_summand(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Convert `whole` to a replicated DTensor whose gradient is this rank's summand of the whole one.

    Args:
        whole: Equal on all ranks.
        mesh: The ranks, one axis.
    """
    same: Tensor = _AsSummand.apply(whole, mesh)
    return same


class _AsSummand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, mesh: DeviceMesh) -> Tensor:
        return DTensor.from_local(alias(whole), mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        # A partial gradient is a summand already. Any other is the whole one, of which each rank takes an equal share.
        if gradient.placements[0].is_partial():
            return gradient.to_local(), None
        return gradient.full_tensor() / gradient.device_mesh.size(), None
