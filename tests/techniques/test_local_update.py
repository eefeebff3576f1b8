"""Updates of sharded parameters on this rank's parts: the same numbers and states, from plain tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel import full_state_dict
from lightning_parallel.techniques.local_update import LocalUpdate, is_elementwise
from tests import parity
from tests.data import batches
from tests.models.cases import GPT
from tests.models.tables import MODULES
from tests.names import num_ranks, num_readers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, dampening=0.2, weight_decay=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, eps=1e-4, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4),
    "foreach": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, 1e-2, eps=1e-4, fused=True),
    "fused_momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, eps=1e-4),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5, eps=1e-4),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2, eps=1e-4),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2, eps=1e-4),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, eps=1e-4),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, eps=1e-2, momentum=0.5, centered=True),
    "asgd": lambda p: torch.optim.ASGD(p, 1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, 1e-3),
}
FUNCTIONS = {torch.optim.AdamW: "adam"}


@contextlib.contextmanager
def stepped(make: Callable[[Any], torch.optim.Optimizer]) -> Iterator[set[type]]:
    """The types of the tensors with which torch's own function of an optimizer is called."""
    cls: Any = type(make([nn.Parameter(torch.zeros(1))]))
    name = FUNCTIONS.get(cls, cls.__name__.lower())
    module = f"torch.optim.{name}"
    seen: set[type] = set()
    plain = getattr(__import__(module, fromlist=[name]), name)

    def spy(*lists: Any, **options: Any) -> Any:
        seen.update(type(value) for values in lists for value in values)
        return plain(*lists, **options)

    with mock.patch.object(__import__(module, fromlist=[name]), name, functools.wraps(plain)(spy)):
        yield seen


class States(L.Callback):
    """Whether states are those of the module's parameters, sharded as these are, and nothing else."""

    def __init__(self) -> None:
        self.are_as_before = True

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for optimizer in trainer.optimizers:
            parameters = {p for group in optimizer.param_groups for p in group["params"]}
            states = dict(dict.items(optimizer.state))  # past the guard of a pipeline
            self.are_as_before &= parameters <= set(pl_module.parameters()) and states.keys() <= parameters
            for parameter, entries in states.items():
                self.are_as_before &= all(is_of(value, parameter) for value in entries.values())


def is_of(value: Any, parameter: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.ndim == 0 or not isinstance(parameter, DTensor):
        return not isinstance(value, DTensor)
    return isinstance(value, DTensor) and value.placements == parameter.placements and value.shape == parameter.shape


def fitted(
    optimizer: str, case: str, strategy: str, ranks: int, file: str = "", **kwargs: Any
) -> tuple[parity.Outcome, set[type], bool]:
    """What a fit did, the types of what was stepped, and whether states are as they were without it."""
    states = States()

    def make() -> Any:
        module: Any = MODULES[case]()
        module.configure_optimizers = lambda: OPTIMIZERS[optimizer](module.parameters())
        return module

    loader = batches(case, num_readers(strategy.partition(":")[0], ranks), kwargs.pop("steps", 5))
    with stepped(OPTIMIZERS[optimizer]) as types:
        outcome = parity.train_module(make, loader, strategy, ranks, watching=[states], **kwargs)
    return outcome, types, states.are_as_before


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_equal_to_one_process(ranks: Any, optimizer: str) -> None:
    """With a scalar that every rank has whole, in one group with shards."""
    theirs = parity.once(fitted, optimizer, "bare_parameter", "auto", 1)[0]
    ours, types, are_as_before = ranks(2).run(fitted, optimizer, "bare_parameter", "fsdp_custom", 2)[0]
    assert parity.worst(ours, theirs) < 1e-6
    assert parity.is_moving(ours)
    assert DTensor not in types
    assert are_as_before


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "fused"])
@pytest.mark.parametrize("strategy", ["hsdp_custom", "tp_custom", "fsdp_tp_custom", "fsdp_offload_custom", "pp_custom"])
def test_under_other_names(ranks: Any, strategy: str, optimizer: str) -> None:
    theirs = parity.once(fitted, optimizer, "bare_parameter", "auto", 1)[0]
    size = num_ranks(strategy)
    for ours, types, are_as_before in ranks(size).run(fitted, optimizer, "bare_parameter", strategy, size):
        assert DTensor not in types
        assert are_as_before
        if ours.final:
            assert parity.worst(ours, theirs) < 1e-6


def as_before() -> Any:
    """Steps as they were before: of DTensors, one by one."""
    return mock.patch("lightning_parallel.steps.is_elementwise", return_value=False)


class Saving(L.Callback):
    """Saves after two steps."""

    def __init__(self, file: str) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.file)


def resumed(optimizer: str, file: str, *, first: bool, second: bool) -> dict[str, Tensor]:
    """Weights of a fit that stops after two steps and goes on from its file; whether each half steps on parts."""

    def run(is_local: bool, **kwargs: Any) -> dict[str, Tensor]:
        L.seed_everything(3, verbose=False)
        module: Any = MODULES["bare_parameter"]()
        module.configure_optimizers = lambda: OPTIMIZERS[optimizer](module.parameters())
        saving = [] if kwargs else [Saving(file)]
        trainer = parity.trainer_for("fsdp_custom", 2, max_steps=5 if kwargs else 2, callbacks=saving)
        with contextlib.nullcontext() if is_local else as_before(), stepped(OPTIMIZERS[optimizer]) as types:
            trainer.fit(module, batches("bare_parameter", 2), **kwargs)
        assert types
        assert (DTensor not in types) == is_local
        return full_state_dict(trainer)

    run(first)
    return run(second, ckpt_path=file)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "rmsprop", "asgd"])
def test_checkpoints_are_those_of_before(ranks: Any, optimizer: str, tmp_path: Path) -> None:
    """In each bit, and each continues from the other's."""
    results, files = [], []
    for first, second in ((True, True), (False, False), (True, False), (False, True)):
        files.append(tmp_path / f"{first}_{second}.ckpt")
        results.append(ranks(2).run(resumed, optimizer, str(files[-1]), first=first, second=second)[0])
    states = [torch.load(file, weights_only=True)["optimizer_states"][0] for file in files]
    for state, weights in zip(states[1:], results[1:], strict=True):
        assert parity.difference(weights, results[0]) < 1e-6
        assert state["param_groups"] == states[0]["param_groups"]
        assert state["state"].keys() == states[0]["state"].keys()
        for number, entries in state["state"].items():
            assert parity.difference(entries, states[0]["state"][number]) < 1e-6


def sharded_model() -> tuple[GPT, list[Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = GPT(depth=1)
    whole = [parameter.detach().clone() for parameter in model.parameters()]
    fully_shard(model, mesh=mesh)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model, whole


def hooks_and_leftovers() -> list[str]:
    """What is wrong of: what hooks see, counters of versions, what a step leaves, and what is left after `detach`."""
    model, _ = sharded_model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    known, wrong = set(model.parameters()), []

    def look(*_: Any) -> None:
        if set(optimizer.state) != known or not all(
            isinstance(entries["momentum_buffer"], DTensor) for entries in optimizer.state.values()
        ):
            wrong.append("a hook of the user's, which is older than ours, sees parts")

    optimizer.register_step_post_hook(look)
    before = dict(vars(optimizer), hooks=len(optimizer._optimizer_step_post_hooks))
    versions = [parameter._version for parameter in model.parameters()]
    update = LocalUpdate(optimizer)
    optimizer.step()
    optimizer.step()
    if not all(p._version > version for p, version in zip(model.parameters(), versions, strict=True)):
        wrong.append("nobody sees that the parameters were written")
    update.detach()
    if dict(vars(optimizer), hooks=len(optimizer._optimizer_step_post_hooks)).keys() != before.keys():
        wrong.append(f"left: {vars(optimizer).keys() - before.keys()}")
    if len(optimizer._optimizer_step_post_hooks) != before["hooks"]:
        wrong.append("a hook is left")
    return wrong


def test_the_optimizer_stays_the_users(ranks: Any) -> None:
    assert ranks(2).run(hooks_and_leftovers) == [[], []]


def with_odd_gradients() -> tuple[set[type], float]:
    """A step whose gradients are whole where parameters are sharded: the numbers, and on what it was made."""
    model, before = sharded_model()
    for parameter in model.parameters():
        parameter.grad = parameter.grad.redistribute(placements=[Replicate()])  # type: ignore[union-attr]
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    update = LocalUpdate(optimizer)
    with stepped(OPTIMIZERS["sgd"]) as types:
        optimizer.step()
    update.detach()
    pairs = zip(model.parameters(), before, strict=True)
    return types, parity.largest((p.detach().full_tensor() - (b - 0.1)).abs().max() for p, b in pairs)  # type: ignore[attr-defined]


def test_what_is_sharded_in_different_ways_is_stepped_as_before(ranks: Any) -> None:
    for types, difference in ranks(2).run(with_odd_gradients):
        assert DTensor in types
        assert difference < 1e-6


def after_an_error() -> list[Any]:
    """The keys of the state that is saved after a step that ended between the update and its end."""
    model, _ = sharded_model()
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    update = LocalUpdate(optimizer)
    with (
        mock.patch.object(optimizer, "_optimizer_step_code", side_effect=KeyboardInterrupt),
        contextlib.suppress(KeyboardInterrupt),
    ):
        optimizer.step()
    state = optimizer.state_dict()["state"]
    update.detach()
    return [len(state) - len(list(model.parameters())), {type(e["momentum_buffer"]) for e in state.values()}]


def test_a_step_that_ends_in_an_error_leaves_no_parts(ranks: Any) -> None:
    assert ranks(2).run(after_an_error) == [[0, {DTensor}]] * 2


def test_other_optimizers_are_left_alone() -> None:
    class Mine(torch.optim.AdamW):
        """May do anything in its step."""

    parameters = [nn.Parameter(torch.ones(2, 2))]
    assert is_elementwise(torch.optim.AdamW(parameters))
    others = (Mine(parameters), torch.optim.LBFGS(parameters), torch.optim.Adafactor(parameters))
    assert not any(map(is_elementwise, others))
