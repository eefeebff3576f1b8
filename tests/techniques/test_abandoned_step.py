"""Units of FSDP2 after a backward that failed: later backwards gather, reduce and free as if it had not been."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_parallel.techniques.sharding import abandon_step


@pytest.fixture
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class FailingBackward(torch.autograd.Function):
    """The identity, whose backward fails."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("out of memory")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, values: Tensor, fails: bool) -> Tensor:
        hidden = self.first(values)
        return self.head(self.second(FailingBackward.apply(hidden) if fails else hidden))


@pytest.mark.usefixtures("_group_of_one")
@pytest.mark.parametrize("is_held", [False, True], ids=["reduced", "held"])
def test_backward_after_an_abandoned_one(is_held: bool) -> None:
    torch.manual_seed(0)
    module, values = Net(), torch.randn(3, 4)
    plain = torch.autograd.grad(module(values, fails=False).square().mean(), list(module.parameters()))
    for unit in (module.first, module.second, module):
        fully_shard(unit)
    module.set_requires_gradient_sync(not is_held)
    with pytest.raises(RuntimeError, match="out of memory"):
        module(values, fails=True).square().mean().backward()
    abandon_step(module)
    module.set_requires_gradient_sync(True)
    module.zero_grad()
    for _ in range(2):
        module(values, fails=False).square().mean().backward()
        for parameter, expected in zip(module.parameters(), plain, strict=True):
            assert isinstance(parameter, DTensor)  # a unit whose gradients are not reduced stays gathered
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected)
        module.zero_grad()
