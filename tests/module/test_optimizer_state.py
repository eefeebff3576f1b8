"""Parts of optimizers' states, on one device: refused to user code, as ever for optimizers."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel import ConfigurationError
from lightning_parallel.module.optimizer_state import StateOfRank


class Counting(Optimizer):
    """An optimizer of the user's own, which reads states in its step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.sizes: list[int] = []

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
        self.sizes.append(len(self.state))


def guarded(make: Callable[..., Any]) -> tuple[Any, nn.Parameter, nn.Parameter, StateOfRank]:
    """An optimizer, the parameter whose state is here after a step, one whose state is elsewhere, and the guard."""
    here, elsewhere = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))
    optimizer = make([here, elsewhere])
    here.grad = torch.ones(3)
    guard = StateOfRank(optimizer, lambda parameter: parameter is elsewhere, where="here")
    optimizer.step()
    return optimizer, here, elsewhere, guard


OF_ONE: dict[str, Callable[[Any, Tensor], Any]] = {
    "item": lambda state, parameter: state[parameter]["exp_avg"],
    "get": lambda state, parameter: state[parameter].get("exp_avg"),
    "in": lambda state, parameter: "exp_avg" in state[parameter],
    "is empty": lambda state, parameter: not state[parameter],
    "items": lambda state, parameter: dict(state[parameter]),
    "list": lambda state, parameter: list(state[parameter]),
    "parameter in": lambda state, parameter: parameter in state,
    "get of parameter": lambda state, parameter: state.get(parameter),
}


@pytest.mark.parametrize("read", OF_ONE)
def test_states_elsewhere_are_refused(read: str) -> None:
    optimizer, here, elsewhere, _ = guarded(torch.optim.Adam)
    OF_ONE[read](optimizer.state, here)
    for state in (optimizer.state, LightningOptimizer(optimizer).state):  # type: ignore[attr-defined]
        with pytest.raises(ConfigurationError, match=r"at .*test_optimizer_state\.py:\d+ reads the state of Adam"):
            OF_ONE[read](state, elsewhere)


OF_ALL: dict[str, Callable[[Any], Any]] = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "of wrapper": lambda optimizer: LightningOptimizer(optimizer).state_dict(),
    "saved": lambda optimizer: torch.save(optimizer.state_dict(), io.BytesIO()),
    "pickled": lambda optimizer: torch.save(optimizer, io.BytesIO()),
    "deepcopy": copy.deepcopy,
    "copy": lambda optimizer: copy.copy(optimizer.state),
    "values": lambda optimizer: list(optimizer.state.values()),
    "sorted": lambda optimizer: sorted(optimizer.state.items(), key=len),
    "keys": lambda optimizer: optimizer.state.keys(),
    "for": lambda optimizer: list(optimizer.state),
    "len": lambda optimizer: len(optimizer.state),
    "dict": lambda optimizer: dict(optimizer.state),
    "or": lambda optimizer: optimizer.state | {},
    "stars": lambda optimizer: {**optimizer.state},
}


@pytest.mark.parametrize("read", OF_ALL)
def test_states_of_all_are_refused(read: str) -> None:
    optimizer, _, _, guard = guarded(torch.optim.Adam)
    with pytest.raises(ConfigurationError, match=r"at .*this rank keeps that of 1 of 2 parameters\. Called on all ran"):
        OF_ALL[read](optimizer)
    assert "others are on other ranks" in repr(optimizer.state)
    guard.detach()
    OF_ALL[read](optimizer)
    assert type(optimizer.state) is defaultdict


def test_optimizers_read_what_is_here() -> None:
    optimizer, _, elsewhere, _ = guarded(Counting)
    optimizer.step()
    assert optimizer.sizes == [2, 2]
    optimizer.state = defaultdict(dict)
    optimizer.step()
    assert optimizer.sizes[-1] == 2
    with pytest.raises(ConfigurationError):
        len(optimizer.state)
    optimizer.state.clear()
    with pytest.raises(ConfigurationError):
        optimizer.state[elsewhere]["count"]


def test_what_is_loaded_is_guarded() -> None:
    optimizer, here, elsewhere, guard = guarded(torch.optim.Adam)
    guard.detach()
    whole = optimizer.state_dict()
    guard = StateOfRank(optimizer, lambda parameter: parameter is elsewhere, where="here")
    optimizer.load_state_dict(whole)
    assert optimizer.state[here]["step"] == 1
    with pytest.raises(ConfigurationError):
        optimizer.state_dict()


def test_entries_of_the_user_are_kept() -> None:
    optimizer, _, elsewhere, _ = guarded(torch.optim.Adam)
    entries = optimizer.state[elsewhere]
    entries["before"] = 1
    entries["after"] = 2
    assert optimizer.state[elsewhere] == {"before": 1, "after": 2}
    assert entries["before"] == entries.get("before") == 1
