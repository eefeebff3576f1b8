"""What is put back into a module, and what stays."""

from __future__ import annotations

import torch
from torch import nn

from lightning_parallel.module.snapshot import Snapshot


def test_what_the_user_changed_meanwhile_stays() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    weight = module[0].weight
    with Snapshot(module) as snapshot:
        module[0].weight = nn.Parameter(torch.ones(2, 2))
        module[0].ours = True
        handle = module[0].register_forward_hook(lambda *args: None)
    assert weight.numel() == 0
    module[0].theirs = True
    module[0].register_forward_hook(lambda *args: None)
    snapshot.restore(lambda tensor: tensor.detach().clone())
    assert module[0].weight is weight
    assert torch.equal(weight, torch.ones(2, 2))
    assert not hasattr(module[0], "ours")
    assert module[0].theirs
    assert len(module[0]._forward_hooks) == 1
    assert handle.id not in module[0]._forward_hooks


def test_memory_format_comes_back() -> None:
    convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    weight = convolution.weight
    value, stride = weight.detach().clone(), weight.stride()
    with Snapshot(convolution) as snapshot:
        convolution.weight = nn.Parameter(weight.detach().contiguous())
    snapshot.restore(lambda tensor: tensor.detach().contiguous())
    assert weight.stride() == stride
    assert torch.equal(weight, value)
