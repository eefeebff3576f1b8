"""Calls of layers whose arguments could not be guessed: a step runs as far as these, and is undone."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from torch.optim import Optimizer

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.module.recorded_calls import LayerCall, RecordedCalls, StepLeft
from lightning_parallel.plan import Plan
from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.strategies.step_logs import StepLogs
from lightning_parallel.techniques.sharding import abandon_step
from lightning_parallel.techniques.tensor.plan import UnseenLayers
from lightning_parallel.techniques.tensor.trace import NAME_MAPS

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

TRAINING = "training_step"
_CONTEXTS = {
    TRAINING: Precision.train_step_context,
    "validation_step": Precision.val_step_context,
    "test_step": Precision.test_step_context,
    "predict_step": Precision.predict_step_context,
}


def first_calls(
    module: LightningModule,
    name: str,
    args: Sequence[Any],
    unseen: Sequence[UnseenLayers],
    *,
    precision: Precision,
    optimizers: Sequence[Optimizer],
    device: torch.device,
) -> Mapping[str, LayerCall]:
    """Run a step until it has called a layer of each kind, and undo what it has done. A collective where it sends.

    Args:
        module: The module; the layers are whole.
        name: The step's name.
        args: Its arguments, which are copied, for it may change them.
        unseen: The layers.
        precision: Opens the context of a step.
        optimizers: Those of the module, whose first update ends the step, too.
        device: This rank's device.

    Returns:
        Path of a layer -> its call; none of a kind that the step does not call.

    Raises:
        ConfigurationError: For arguments that have no copy.
    """
    try:
        given = copy.deepcopy(_taken(getattr(module, name), args))
    except Exception as error:  # of the user's objects
        raise ConfigurationError([_no_copy(name, error, unseen)]) from None
    kept, are_trained = KeptState(module), [(p, p.requires_grad) for p in module.parameters()]
    calls = RecordedCalls(module, [each.layers for each in unseen])
    with (
        unchanged_generators(device),
        StepLogs(module).of(0),
        contextlib.redirect_stdout(io.StringIO()),
        torch.compiler.set_stance("force_eager"),
        calls,
        _left_at_updates(optimizers),
        _CONTEXTS[name](precision),
    ):
        getattr(module, name)(*given)
    abandon_step(module)
    kept.restore()
    for parameter, is_trained in are_trained:  # `toggle_optimizer` freezes those of others
        parameter.requires_grad_(is_trained)
        parameter.grad = None
    return calls.found


def takes_iterator(module: LightningModule, name: str) -> bool:
    """Whether a step is given the dataloader's iterator in place of a batch.

    Args:
        module: The user's module.
        name: The step's name.
    """
    return "dataloader_iter" in inspect.signature(getattr(module, name)).parameters


def agreed_plan(plan: Plan, group: dist.ProcessGroup) -> Plan:
    """The plan of the first rank, on all ranks: they have to split the same maps. A collective.

    Args:
        plan: That of this rank.
        group: All ranks.
    """
    box = [plan]
    dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group=group)
    return box[0]


def unrecorded_violations(unseen: Sequence[UnseenLayers], *, is_too_large: bool, gives_iterator: bool) -> list[str]:
    """Reasons why no step can show the arguments of layers; empty if one can.

    Args:
        unseen: The layers.
        is_too_large: Whether a rank cannot hold the whole module, which it does until the step has shown them.
        gives_iterator: Whether the step takes the dataloader's iterator.
    """
    if is_too_large:
        return [f"{each.reason}. The first step would show what it is given, {_TOO_LARGE}" for each in unseen]
    if gives_iterator:
        return [f"{each.reason}. The first step would show what it is given, {_AN_ITERATOR}" for each in unseen]
    return []


def told(plan: Plan, name: str, calls: Mapping[str, LayerCall]) -> str:
    """The decision that a step has led to, in a sentence for users."""
    assert plan.tensor is not None
    number = sum(split.role != "whole" for split in plan.tensor.splits)
    shown = "; ".join(f"{path} ({call})" for path, call in calls.items())
    return (
        f"tensor parallelism: the first {name} has shown what layers are given, {shown or 'and calls none of them'}; "
        f"{number} of {len(plan.tensor.splits)} linear maps are split"
    )


def _taken(step: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, ...]:
    """Those of the arguments that a step takes: many take no number of the batch."""
    kinds = [parameter.kind for parameter in inspect.signature(step).parameters.values()]
    is_any = inspect.Parameter.VAR_POSITIONAL in kinds
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(args) if is_any else tuple(args[: sum(kind in named for kind in kinds)])


@contextlib.contextmanager
def _left_at_updates(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Leave the step before anything is updated: under manual optimization it updates by itself."""

    def leave(*args: Any) -> None:
        raise StepLeft

    handles = [optimizer.register_step_pre_hook(leave) for optimizer in optimizers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _no_copy(name: str, error: Exception, unseen: Sequence[UnseenLayers]) -> str:
    return (
        f"the first {name} would show what {unseen[0].layers[0]} is given, to see what flows through it, and its batch "
        f"cannot be copied for that ({type(error).__name__}: {error}); {NAME_MAPS}"
    )


_TOO_LARGE = (
    "but until then each rank would hold the whole module, which takes more than a quarter of its share of host "
    f"memory: {NAME_MAPS}"
)
_AN_ITERATOR = f"but it takes the dataloader's iterator, and a batch that it reads on trial would be lost: {NAME_MAPS}"
