"""Gradients that are sent in fewer bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_parallel.techniques.compression import register_comm_hook


def compressed(hook: str) -> float:
    """The relative error of a DDP gradient after four steps of communication."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    reference = nn.Linear(64, 64)
    reference.load_state_dict(model.state_dict())
    ddp = nn.parallel.DistributedDataParallel(model)
    register_comm_hook(ddp, hook, powersgd_rank=None)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    for _ in range(4):
        ddp.zero_grad()
        ddp(x[dist.get_rank() :: 2]).pow(2).mean().backward()
    reference(x).pow(2).mean().backward()
    error = (model.weight.grad - reference.weight.grad).norm() / reference.weight.grad.norm()
    return float(error)


@pytest.mark.parametrize(("hook", "least", "most"), [("none", 0, 1e-6), ("fp16", 1e-6, 1e-3), ("powersgd", 1e-3, 1)])
def test_comm_hooks_run_on_gloo(ranks: Any, hook: str, least: float, most: float) -> None:
    assert all(least <= error <= most for error in ranks(2).run(compressed, hook))
