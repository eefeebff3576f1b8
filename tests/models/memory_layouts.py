"""Buffers, frozen parameters and samples of other layouts and dtypes than dense tensors of floating-point numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import Block, ByteGPT


def _register(module: nn.Module) -> None:
    module.register_buffer("table", torch.arange(8.0).expand(4, 8), persistent=False)
    module.register_buffer("steps", torch.zeros(1).expand(3), persistent=False)
    module.register_buffer("scales", torch.arange(16.0).to(torch.float8_e4m3fn))
    module.register_buffer("codes", torch.arange(8, dtype=torch.int16))
    module.register_buffer("edges", torch.eye(4).to_sparse())
    module.register_buffer("rows", torch.eye(4).to_sparse_csr())
    module.register_buffer("learnt", torch.ones(3, requires_grad=True))
    module.frozen = nn.Parameter(torch.arange(16.0).to(torch.float8_e5m2), requires_grad=False)


def _used(module: Any) -> Tensor:
    if module.training:
        module.steps = (module.steps[:1] + 1).expand(3)
    numbers = (module.table, module.scales, module.codes, module.learnt, module.frozen)
    sums = [each.float().mean() for each in (*numbers, module.edges.to_dense(), module.rows.to_dense())]
    return 0.01 * torch.stack(sums).sum()


class LayoutsInLayer(Block):
    def __init__(self) -> None:
        super().__init__()
        _register(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + _used(self)) + 0.1 * x.roll(1, -1)


class Layouts(ByteGPT):
    """Has them in the module and in each layer; elements of some share memory, as `Tensor.expand` makes them."""

    def __init__(self) -> None:
        super().__init__()
        _register(self)
        self.model.blocks = nn.ModuleList(LayoutsInLayer() for _ in range(4))

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * (1 + _used(self))


class SparseSamples(ByteGPT):
    """Takes, besides tokens, what is known of a few of them, as sparse tensors."""

    def loss(self, tokens: Tensor, known: Tensor) -> Tensor:
        return super().loss(tokens) + 0.01 * self.model.head.weight.mean() * known.to_dense().mean()
