"""Optimizers of which each rank has a share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_parallel.techniques.optimizer_sharding import ShardedOptimizer, deal_out, optimizer_violations
from tests.models.cases import GPT
from tests.parity import largest


def test_parameters_are_dealt_out_evenly() -> None:
    assert deal_out([4, 3, 3, 2], 2) == [0, 1, 1, 0]
    assert deal_out([], 2) == []
    assert sorted(deal_out([1] * 8, 4)) == [0, 0, 1, 1, 2, 2, 3, 3]


def zero1(name: str) -> dict[str, Any]:
    """Ours beside the same optimizer on one device, for optimizers with statistics of a whole matrix too."""
    torch.manual_seed(0)
    ours, theirs = GPT(), GPT()
    theirs.load_state_dict(ours.state_dict())
    make = {
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-4, foreach=True),
    }[name]
    optimizer, reference = make(ours.parameters()), make(theirs.parameters())
    sharded = ShardedOptimizer(optimizer)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(2))
    for step in range(3):
        for model, one in ((ours, optimizer), (theirs, reference)):
            one.zero_grad()
            model(tokens).pow(2).mean().backward()
            if step == 1:
                one.step(lambda: None)
            else:
                one.step()
    gradients = all(p.grad is not None for p in ours.parameters())
    held = sum(len(entries) > 0 for entries in dict.values(optimizer.state))
    sharded.make_whole()
    whole = optimizer.state_dict()["state"]
    expected = reference.state_dict()["state"]
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return {
        "difference": largest((a - b).detach().abs().max() for a, b in pairs),
        "gradients": gradients,
        "held": held,
        "all": len(expected),
        "state": list(whole) == list(expected)
        and all(torch.allclose(whole[i][k], expected[i][k], atol=1e-5) for i in expected for k in expected[i]),
        "hooks": len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks),
    }


@pytest.mark.parametrize("name", ["adamw", "adagrad", "adafactor"])
def test_zero1_equals_one_device(ranks: Any, name: str) -> None:
    found = ranks(2).run(zero1, name)
    assert all(one["difference"] < 1e-5 and one["gradients"] and one["state"] and one["hooks"] == 0 for one in found)
    assert sum(one["held"] for one in found) == found[0]["all"]
    assert all(0 < one["held"] < one["all"] for one in found)


def test_lbfgs_is_refused() -> None:
    assert "ddp_custom" in optimizer_violations(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))[0]
