"""State of optimizers that is on the host between updates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_parallel import _torch
from lightning_parallel.ranks.dtensors import local_of
from lightning_parallel.techniques import offload
from lightning_parallel.techniques.offload import OffloadedState


class Host:
    """Stands for the host, which has a dtype of its own: there is no second device here."""

    dtype = torch.float64

    def __init__(self) -> None:
        self.moves: list[str] = []

    def memory(self, value: Tensor) -> Tensor | None:
        if value.dtype == self.dtype:
            return None
        self.moves.append("memory")
        return torch.full_like(value, torch.nan, dtype=self.dtype)

    def back(self, value: Tensor, parameter: Tensor) -> Tensor:
        self.moves.append("back")
        return value.to(parameter.dtype)


def test_offloaded_state_is_away_between_updates() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer, host = torch.optim.AdamW([parameter], lr=0.1), Host()
    offloaded = OffloadedState(optimizer, host_memory=host.memory, to_device=host.back)
    reference = nn.Parameter(parameter.detach().clone())
    expected = torch.optim.AdamW([reference], lr=0.1)

    def closure() -> Tensor:
        assert all(value.dtype == host.dtype for value in optimizer.state[parameter].values() if value.ndim)
        parameter.grad = parameter.detach() * 2
        return parameter.sum()

    for _ in range(3):
        optimizer.step(closure)
        reference.grad = reference.detach() * 2
        expected.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == host.dtype
        assert optimizer.state[parameter]["step"].dtype == torch.float32
    assert torch.equal(parameter, reference)
    offloaded.detach()
    for name, value in expected.state[reference].items():
        assert torch.equal(optimizer.state[parameter][name], value)
    assert host.moves == ["memory"] * 2 + (["back"] * 2 + ["memory"] * 2) * 2 + ["back"] * 2


def test_memory_of_the_host_is_used_again() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer, host = torch.optim.AdamW([parameter], lr=0.1), Host()
    host.dtype = torch.float32  # as on a device: the same one

    def memory(value: Tensor) -> Tensor:
        host.moves.append("memory")
        return torch.full_like(value, torch.nan)

    OffloadedState(optimizer, host_memory=memory, to_device=lambda value, _: value.clone())
    places = []
    for _ in range(3):
        parameter.grad = parameter.detach() * 2
        optimizer.step()
        state = optimizer.state[parameter]
        places.append((state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()))
        assert not torch.isnan(parameter).any()
    assert host.moves == ["memory"] * 2
    assert len(set(places)) == 1


def test_another_state_of_another_shape_is_taken() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    offloaded = OffloadedState(optimizer, host_memory=torch.zeros_like, to_device=lambda value, _: value.clone())
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    loaded = optimizer.state_dict()
    loaded["state"][0]["momentum_buffer"] = torch.full((4, 4), 5.0)
    optimizer.load_state_dict(loaded)
    offloaded.store()
    assert optimizer.state[parameter]["momentum_buffer"].eq(5).all()
    optimizer.state[parameter]["momentum_buffer"] = torch.full((2, 4), 6.0)
    offloaded.store()
    assert optimizer.state[parameter]["momentum_buffer"].eq(6).all()
    assert optimizer.state[parameter]["momentum_buffer"].shape == (2, 4)


def test_memory_for_a_tensor_of_a_device() -> None:
    """Pageable, where nothing can be pinned; none for what is there, or is of another kind."""
    value = torch.empty(3, 4, dtype=torch.bfloat16, device="meta").t()
    memory = offload._pinned_memory(value)
    assert memory is not None
    assert (memory.device.type, memory.dtype) == ("cpu", value.dtype)
    assert (memory.shape, memory.stride()) == (value.shape, value.stride())
    assert offload._pinned_memory(torch.empty(3)) is None
    assert offload._pinned_memory(nn.Parameter(value)) is None


def like_another() -> list[bool]:
    """Whether a DTensor made like another one is as that, of other memory."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)])
    part = torch.zeros_like(sharded.to_local())
    made = _torch.tensors.with_local(sharded, part)
    local_of(made).copy_(sharded.to_local())
    return [
        made.placements == sharded.placements and made.shape == sharded.shape and made.stride() == sharded.stride(),
        made.to_local().data_ptr() == part.data_ptr(),
        torch.equal(made.full_tensor(), sharded.full_tensor()),
        torch.equal(made.to("cpu").full_tensor(), sharded.full_tensor()),
    ]


def test_a_dtensor_of_other_memory(ranks: Any) -> None:
    assert all(map(all, ranks(2).run(like_another)))
