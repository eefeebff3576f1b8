"""Clipping by the norm of sharded and whole parameters together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.clipping import clip_gradients_by_norm
from tests.models.cases import GPT
from tests.parity import largest


def clip(norm_type: float, max_norm: float) -> float:
    """The largest difference to torch in one process, for sharded and whole parameters together."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model, reference = GPT(), GPT()
    reference.load_state_dict(model.state_dict())
    whole = {model.norm.weight, model.norm.bias}
    fully_shard(model, mesh=mesh, ignored_params=whole)
    generator = torch.Generator().manual_seed(1)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = torch.randn(theirs.shape, generator=generator)
        ours.grad = theirs.grad.clone()
        if isinstance(ours, DTensor):
            ours.grad = distribute(theirs.grad, ours)
    parameters = [*model.parameters(), model.norm.weight]  # twice: counted once
    ours_norm = clip_gradients_by_norm(parameters, max_norm, norm_type)
    theirs_norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm, norm_type)
    differences = [float(abs(ours_norm - theirs_norm))]
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        differences.append(float((gradient - theirs.grad).abs().max()))
    return largest(differences)


def distribute(value: Tensor, like: DTensor) -> Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
@pytest.mark.parametrize("size", [2, 4])
def test_clipping_equals_torch(ranks: Any, size: int, norm_type: float, max_norm: float) -> None:
    tolerance = 1e-3 if norm_type == 1.0 else 1e-5  # the 1-norm of 11,152 elements is itself some 9,000
    assert largest(ranks(size).run(clip, norm_type, max_norm)) < tolerance


def test_clipping_without_gradients() -> None:
    assert clip_gradients_by_norm([nn.Parameter(torch.ones(2))], 1.0) == 0
