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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.clipping import clip_gradients_by_norm, clip_gradients_by_value
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


class Allocated(TorchDispatchMode):
    """Counts the elements of new memory that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        new = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.elements += sum(t.numel() for t in new if t.untyped_storage().data_ptr() not in known)
        return result


@pytest.mark.parametrize("clip_gradients", [clip_gradients_by_norm, clip_gradients_by_value])
def test_clipping_makes_no_copy_of_the_gradients(clip_gradients: Any) -> None:
    parameters = [nn.Parameter(torch.ones(100, 100)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    with Allocated() as allocated:
        clip_gradients(parameters, 0.5)
    assert float(parameters[0].grad.max()) < 1  # type: ignore[union-attr]
    assert allocated.elements < 100  # scalars; there are 40,000 elements


def test_clipping_without_gradients() -> None:
    assert clip_gradients_by_norm([nn.Parameter(torch.ones(2))], 1.0) == 0
