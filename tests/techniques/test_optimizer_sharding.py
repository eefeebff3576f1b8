"""Optimizers of which each rank has a share."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.strategies import zero
from lightning_parallel.techniques.optimizer_sharding import ShardedOptimizer, deal_out, optimizer_violations
from tests.collectives import Collectives, Counts
from tests.data import STEPS, batches, loader
from tests.models.cases import GPT, ByteGPT
from tests.parity import largest, train_module, trainer_for


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


class Messages:
    """Size in bytes, or in characters of a pickle, and group of all that is sent with the functions of `dist`."""

    NAMES = ("all_gather_object", "gather_object", "broadcast_object_list", "broadcast", "send", "recv", "all_gather")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.groups: set[Any] = set()

    def watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.groups.add(kwargs.get("group"))
            self.sizes.append(max(t.nbytes if isinstance(t, Tensor) else len(pickle.dumps(t)) for t in args))
            return original(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in self.NAMES:
                stack.enter_context(mock.patch.object(dist, name, self.watched(getattr(dist, name))))
            yield


def plain(optimizer: torch.optim.Optimizer) -> dict[int, Any]:
    """The state that is here by the number of the parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    here = dict(dict.items(optimizer.state))
    return {number: here[parameter] for number, parameter in enumerate(parameters) if parameter in here}


def gathered_state() -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    model.append(nn.Conv2d(4, 4, 8).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(model.parameters())
    host_group, messages = build_host_group("cuda"), Messages()
    sharded = ShardedOptimizer(optimizer, host_group)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    own = plain(optimizer)
    with messages.noted():
        state = sharded.gather_state()
        sharded.make_whole()
    whole = plain(optimizer)
    return {
        "is new": host_group is not dist.group.WORLD and build_host_group("cuda") is host_group,
        "groups": messages.groups == {host_group},
        "largest": max(messages.sizes),
        "saved": state if state is None else largest_difference(state["state"], whole),
        "own": largest_difference(own, whole),
        "laid out": all(whole[number]["exp_avg"].stride() == p.stride() for number, p in enumerate(model.parameters())),
        "loaded": sharded.own_part(whole).keys() == own.keys(),
    }


def largest_difference(some: dict[int, Any], all_: dict[int, Any]) -> float:
    return max(float((some[n][name] - all_[n][name]).abs().max()) for n in some for name in some[n])


def test_whole_state_goes_over_host_memory_tensor_by_tensor(ranks: Any) -> None:
    """As objects over the group of the process, all state at once would be in the memory of the GPU."""
    first, second = ranks(2).run(gathered_state)
    assert first == {**second, "saved": 0.0}
    assert all(first[name] for name in ("is new", "groups", "laid out", "loaded"))
    assert first["own"] == 0
    assert first["largest"] == 64 * 64 * 4
    assert second["saved"] is None


def test_zero1_gathers_over_the_group_for_host_memory(ranks: Any) -> None:
    assert ranks(2).run(groups_of_zero1) == [True] * 2


def host_group_of_gpus(device_type: str, *, timeout: Any) -> Any:
    assert device_type == "cpu"
    return build_host_group("cuda", timeout=timeout)


def groups_of_zero1() -> bool:
    messages = Messages()
    trainer = trainer_for("zero1_custom", 2, max_steps=1)
    with (
        mock.patch.object(zero, "build_host_group", host_group_of_gpus),
        mock.patch.object(ShardedOptimizer, "make_whole", watched_with(messages, ShardedOptimizer.make_whole)),
    ):
        trainer.fit(ByteGPT("adamw"), loader(2, 1))
    return messages.groups == {build_host_group("cuda")}


def watched_with(messages: Messages, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with messages.noted():
            return original(*args)

    return call


def test_lbfgs_is_refused() -> None:
    assert "ddp_custom" in optimizer_violations(torch.optim.LBFGS([nn.Parameter(torch.zeros(1))]))[0]


class Counted(ByteGPT):
    """Counts what ranks send from the last hook before an update to the first one behind it."""

    mode = Collectives()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == STEPS - 1:
            self.mode.__enter__()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == STEPS - 1:
            self.mode.__exit__(None, None, None)


def sent_after_an_update() -> Counts:
    Counted.mode = Collectives()
    train_module(Counted, batches("byte_gpt", 2), "zero1_custom", 2)
    return Counts(dict(Counted.mode.counts))


def test_what_ranks_send_after_an_update_can_be_counted(ranks: Any) -> None:
    """It was done behind all modes, so that a bench showed half of what zero1_custom sends."""
    counts = ranks(2).run(sent_after_an_update)[0]
    assert counts.number("broadcast_") == 2, counts
