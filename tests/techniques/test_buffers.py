"""Buffers that layers see in another dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_parallel.techniques.buffers import apply_buffer_dtype


class WithTable(nn.Module):
    """A table that is no parameter, as those of rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((4,), 1 / 3))
        self.register_buffer("count", torch.zeros(1))
        self.seen: torch.dtype | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.table.dtype
        self.count += 1
        return x * self.table


def test_buffers_are_seen_in_another_dtype() -> None:
    module = nn.Sequential(WithTable(), nn.BatchNorm1d(4))
    table = module[0].table
    apply_buffer_dtype(module, torch.bfloat16)
    module(torch.ones(2, 4))
    assert module[0].seen == torch.bfloat16
    assert module[0].table is table
    assert module[0].count.tolist() == [1.0]
    assert module[1].running_mean.dtype == torch.float32
