"""State of optimizers that is on the host between updates."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.offload import OffloadedState


def test_offloaded_state_is_away_between_updates() -> None:
    parameter = nn.Parameter(torch.randn(4, 4))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    moves: list[str] = []

    def away(value: Tensor) -> Tensor:
        moves.append("away")
        return value.to(torch.float64)  # stands for the host: there is no second device here

    def back(value: Tensor, parameter: Tensor) -> Tensor:
        moves.append("back")
        return value.to(parameter.dtype)

    offloaded = OffloadedState(optimizer, to_host=away, to_device=back)
    reference = nn.Parameter(parameter.detach().clone())
    expected = torch.optim.AdamW([reference], lr=0.1)

    def closure() -> Tensor:
        assert all(value.dtype == torch.float64 for value in optimizer.state[parameter].values() if value.ndim)
        parameter.grad = parameter.detach() * 2
        return parameter.sum()

    for _ in range(3):
        optimizer.step(closure)
        reference.grad = reference.detach() * 2
        expected.step()
        assert optimizer.state[parameter]["exp_avg"].dtype == torch.float64
        assert optimizer.state[parameter]["step"].dtype == torch.float32
    assert torch.equal(parameter, reference)
    offloaded.detach()
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.float32
    assert moves == ["away"] * 2 + ["back", "back", "away", "away"] * 2 + ["back"] * 2
