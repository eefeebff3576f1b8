"""Optimizers that update each parameter as soon as its gradient is there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.techniques.update_in_backward import UpdateInBackward
from tests.data import loader_of
from tests.models.cases import CASES
from tests.parity import TOLERANCE, Recorder, difference, make_trainer


class Watching(Recorder):
    """How many gradients of sharded parameters exist when backward has ended."""

    gradients = 0

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.gradients = max(self.gradients, sum(p.grad is not None for p in pl_module.parameters()))


def in_backward(case: str, name: str, num_ranks: int) -> tuple[dict[str, Any], int]:
    L.seed_everything(3, verbose=False)
    watching = Watching()
    strategy = name if name == "auto" else build_strategy(name)
    trainer = make_trainer(strategy, num_ranks, callbacks=[watching])
    trainer.fit(CASES[case]("adamw"), loader_of(case, steps=5, global_batch=8, num_ranks=num_ranks))
    return full_state_dict(trainer), watching.gradients


@pytest.mark.parametrize("case", ["byte_gpt", "bare_parameter", "hf_gpt2", "parameter_groups", "configure_model"])
@pytest.mark.parametrize("name", ["fsdp_custom", "zero2_custom"])
def test_update_in_backward(ranks: Any, name: str, case: str) -> None:
    ours, gradients = ranks(2).run(in_backward, case, f"{name}:optimizer_in_backward=true", 2)[0]
    theirs, all_gradients = in_backward(case, "auto", 1)
    assert difference(ours, theirs) < TOLERANCE
    assert gradients <= 1 < all_gradients  # a scalar stays whole, and is updated after backward


def test_partly_frozen_modules_update_in_backward(ranks: Any) -> None:
    ours, _ = ranks(2).run(in_backward, "frozen_lora", "fsdp_custom:optimizer_in_backward=true", 2)[0]
    assert difference(ours, in_backward("frozen_lora", "auto", 1)[0]) < TOLERANCE


class Counting(list[Any]):
    """A list that counts how many of its entries are looked at."""

    looks = 0

    def __iter__(self) -> Any:
        for entry in super().__iter__():
            Counting.looks += 1
            yield entry

    def __getitem__(self, index: Any) -> Any:
        Counting.looks += 1
        return super().__getitem__(index)


def looks_of(num: int, *, apart: bool) -> int:
    """At how many entries of groups, and groups, a backward looks; after a state was loaded, which makes new groups."""
    layers = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(num))
    parameters = list(layers.parameters())
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters] if apart else parameters, lr=0.1)
    updates = UpdateInBackward(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups = Counting(optimizer.param_groups)
    for group in optimizer.param_groups:
        group["params"] = Counting(group["params"])
    before = [parameter.detach().clone() for parameter in parameters]
    Counting.looks = 0
    sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()  # type: ignore[union-attr]
    looks = Counting.looks
    assert all(torch.allclose(p, b - 0.1) for p, b in zip(parameters, before, strict=True))
    assert [len(group["params"]) for group in optimizer.param_groups] == ([1] * num if apart else [num])
    updates.detach()
    return looks


@pytest.mark.parametrize("apart", [False, True])
def test_an_update_looks_at_its_parameter_alone(apart: bool) -> None:
    few, many = looks_of(10, apart=apart), looks_of(80, apart=apart)
    assert many <= 9 * few


def test_parameters_that_left_their_group_are_not_updated() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([first, second], lr=0.1)
    updates = UpdateInBackward(optimizer)
    optimizer.param_groups[0]["params"] = [second]
    (first + second).sum().backward()
    updates.detach()
    assert first.tolist() == [1, 1]
    assert second.tolist() == pytest.approx([0.9, 0.9])
