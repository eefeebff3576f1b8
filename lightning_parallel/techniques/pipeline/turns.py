"""Stages that take turns: a step runs once on every rank, and each layer on the rank that has it.

All ranks run the whole step, on the whole batch. A call of a layer is a collective of the pipeline: the rank that has
the layer runs it, and sends to the others what it returns. So outside of the layers every rank computes the same, from
the same values. A step may call layers in any order and any number of times, look at values, run backward and update
where it likes. The price is time: while one rank runs a layer, the others wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.given_containers import GivenContainers, has_containers, is_record
from lightning_parallel.module.hidden_states import ENDS_LAYER
from lightning_parallel.module.kv_cache import is_cache
from lightning_parallel.module.layer_logs import LayerLogs, LoggedValue
from lightning_parallel.module.left_values import LeftValue, LeftValues
from lightning_parallel.module.placeholders import name_sources, placeholders_in
from lightning_parallel.ranks.random_streams import drawing_aside, pass_number
from lightning_parallel.ranks.stage_owners import broadcast_object
from lightning_parallel.techniques.pipeline.layer_checkpoints import LayerCheckpoints
from lightning_parallel.techniques.pipeline.records import put_together, taken_apart
from lightning_parallel.techniques.pipeline.shape_inference import fill_cache
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan

CallOfLayer = Callable[[int, nn.Module, Callable[..., Any], Callable[..., Any], Any, Any], Any]
"""Takes a layer's number, the layer, its `__call__`, its `forward`, and arguments; returns what the layer returns."""
_Form = tuple[torch.dtype, torch.Size, bool]
"""Dtype, shape and requires_grad of a tensor that a layer returns."""


def run_here(
    index: int, layer: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a layer on this rank, by itself: a `CallOfLayer`."""
    return run(*args, **kwargs)


class DisorderError(ConfigurationError):
    """Refusal of a step that does not call each layer once, in order, where a schedule needs that."""


class Turns:
    """Runs calls of layers in which all ranks of a pipeline take part.

    Args:
        plan: The layers of each stage, and its rank.
        paths: The paths of the layers, in order.
        left_values: Finds what layers leave elsewhere than in their results.
        logs: Takes what layers log.
        group: The ranks of the pipeline.
        host_group: The same, for host memory.
    """

    def __init__(
        self,
        plan: StagePlan,
        paths: Sequence[str],
        left_values: LeftValues,
        logs: LayerLogs,
        group: ProcessGroup,
        host_group: ProcessGroup,
    ) -> None:
        self._plan, self._paths, self._group, self._host_group = plan, paths, group, host_group
        self._left_values, self._logs = left_values, logs
        self._checkpoints = LayerCheckpoints()

    def opened(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the user's activation checkpoints around layers become those of each layer.

        Backward would call what is checkpointed again on the rank that has its layers, and the others would not come.
        """
        return self._checkpoints.opened(lambda: False)

    def is_in_layer(self, name: str) -> bool:
        """Whether a parameter belongs to a layer of the stack."""
        return any(name.startswith(f"{path}.") for path in self._paths)

    def call(
        self, index: int, layer: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Return what a layer returns, on every rank. A collective of the pipeline.

        Args:
            index: The layer's number in the stack.
            layer: The layer.
            run: Its `__call__`, with all hooks.
            forward: Its `forward` alone.
            args: Its arguments; the same on every rank.
            kwargs: Those by name.
        """
        owner = self._plan.rank_of(self._plan.stage_at(index))
        leaves, spec = tree_flatten(taken_apart((args, kwargs)), is_leaf=is_cache)
        if placeholders := placeholders_in(leaves):
            raise ConfigurationError([_FOREIGN.format(self._paths[index], name_sources(placeholders))])
        places = [p for p, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        places = places if torch.is_grad_enabled() else []
        inputs = _Entry.apply(self._group, owner, *(leaves[place] for place in places)) if places else ()
        for place, tensor in zip(places, inputs, strict=True):
            leaves[place] = tensor
        given = args, kwargs
        args, kwargs = put_together(tree_unflatten(leaves, spec))
        if owner != self._group.rank():
            if any(map(is_cache, leaves)):
                before = self._left_values.before(layer)
                fill_cache(layer, forward, args, kwargs)
                before.take_away(before.found())
            result, left = self._follow(owner, inputs, leaves)
            if left:
                self._left_values.before(layer, given, given).put(left)
            return result
        before = self._left_values.before(layer, (args, kwargs), given)
        containers = GivenContainers(given, (args, kwargs)) if has_containers(given) else None
        with drawing_aside(index) as has_drawn, self._logs.taken() as logged:
            result = self._checkpoints.run(run, args, kwargs)
            draws = has_drawn()
        if containers is not None and (kinds := containers.changed(_has_slots)):
            raise ConfigurationError([_SLOTS.format(self._paths[index], " and ".join(kinds))])
        own = before.found()
        result, left = self._publish(owner, inputs, leaves, result, own, draws=draws, logged=logged)
        before.put(left, old=[each.value for each in own])
        return result

    def _publish(
        self,
        owner: int,
        inputs: Sequence[Tensor],
        arguments: list[Any],
        result: Any,
        left: list[LeftValue],
        *,
        draws: bool,
        logged: list[LoggedValue],
    ) -> tuple[Any, list[LeftValue]]:
        """Send the result of a layer, and what it has left and logged, to the other ranks."""
        result = taken_apart(result)
        leaves, spec = tree_flatten((result, left), is_leaf=is_cache)
        # What hooks have left may be what the layer was given, or returns: others have that.
        known = [*arguments, *tree_leaves(result, is_leaf=is_cache)]
        num_returned = len(known) - len(arguments)
        places = [
            place
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor)
            and leaf.layout is torch.strided
            and (place < num_returned or all(each is not leaf for each in known))
        ]
        # Of one layout on all ranks: products of other strides round otherwise, and their gradients would part.
        tensors = [leaves[place].contiguous() for place in places]
        forms = [(t.dtype, t.shape, t.requires_grad and torch.is_grad_enabled()) for t in tensors]
        rest = {
            place: _in_words(leaf, known[: len(arguments) + min(place, num_returned)])
            for place, leaf in enumerate(leaves)
            if place not in set(places)
        }
        broadcast_object((spec, places, forms, rest, draws, logged), owner, self._host_group)
        _advance(draws)
        self._logs.repeat(logged)
        if any(wants for *_, wants in forms):
            tensors = list(_Exit.apply(self._group, owner, forms, len(tensors), *tensors, *inputs))
        else:
            _send(tensors, self._group, owner)
        found: tuple[Any, list[LeftValue]] = _filled(spec, places, tensors, rest, arguments)
        return found

    def _follow(self, owner: int, inputs: Sequence[Tensor], arguments: list[Any]) -> tuple[Any, list[LeftValue]]:
        """Receive the result of a layer of another rank, and what it has left."""
        spec, places, forms, rest, draws, logged = broadcast_object(None, owner, self._host_group)
        _advance(draws)
        self._logs.repeat(logged)
        device = _device_of(arguments)
        if any(wants for *_, wants in forms):
            anchor = torch.zeros((), requires_grad=True)
            tensors = _Received.apply(self._group, owner, forms, device, anchor, *inputs)
        else:
            tensors = _receive(forms, device, self._group, owner)
        found: tuple[Any, list[LeftValue]] = _filled(spec, places, tensors, rest, arguments)
        return found


def check_loss(loss: Tensor) -> None:
    """Refuse a loss that only some stages have.

    Raises:
        ConfigurationError: For a placeholder.
    """
    if placeholders := placeholders_in(loss):
        raise ConfigurationError([_LOSS.format(name_sources(placeholders))])


class _Entry(torch.autograd.Function):
    """Arguments of a layer; backward gives their gradients to all ranks, which have computed the same arguments."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, owner: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.owner = group, owner
        ctx.forms = [(t.dtype, t.shape, t.device) for t in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = []
        for gradient, (dtype, shape, device) in zip(gradients, ctx.forms, strict=True):
            if ctx.group.rank() != ctx.owner:
                gradient = torch.empty(shape, dtype=dtype, device=device)
            elif gradient is None:
                gradient = torch.zeros(shape, dtype=dtype, device=device)
            found.append(gradient.contiguous())
        _send(found, ctx.group, ctx.owner)
        return None, None, *found


class _Exit(torch.autograd.Function):
    """Results of a layer, sent to the other ranks; backward also reaches arguments that the layer has not used."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, owner: int, forms: Sequence[_Form], count: int, *tensors: Tensor) -> Any:
        ctx.num_inputs = len(tensors) - count
        setattr(ctx, ENDS_LAYER, True)
        ctx.set_materialize_grads(False)
        results = tuple(tensor.detach() for tensor in tensors[:count])
        ctx.mark_non_differentiable(*(r for r, (*_, wants) in zip(results, forms, strict=True) if not wants))
        _send(results, group, owner)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, None, *gradients, *(None for _ in range(ctx.num_inputs))


class _Received(torch.autograd.Function):
    """Results of a layer of another rank; backward reaches the arguments, whose gradients come from there."""

    @staticmethod
    def forward(
        ctx: Any,
        group: ProcessGroup,
        owner: int,
        forms: Sequence[_Form],
        device: torch.device,
        anchor: Tensor,
        *inputs: Tensor,
    ) -> Any:
        ctx.num_inputs = len(inputs)
        setattr(ctx, ENDS_LAYER, True)
        ctx.set_materialize_grads(False)
        results = tuple(_receive(forms, device, group, owner))
        ctx.mark_non_differentiable(*(r for r, (*_, wants) in zip(results, forms, strict=True) if not wants))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, None, None, *(None for _ in range(ctx.num_inputs))


def _send(tensors: Sequence[Tensor], group: ProcessGroup, owner: int) -> None:
    """Broadcast contiguous tensors from their owner, into those of the other ranks."""
    for tensor in tensors:
        dist.broadcast(tensor.detach(), group=group, group_src=owner)


def _receive(forms: Sequence[_Form], device: torch.device, group: ProcessGroup, owner: int) -> list[Tensor]:
    tensors = [torch.empty(shape, dtype=dtype, device=device) for dtype, shape, _ in forms]
    _send(tensors, group, owner)
    return tensors


def _filled(
    spec: TreeSpec,
    places: Sequence[int],
    tensors: Sequence[Tensor],
    rest: dict[int, tuple[bool, Any]],
    arguments: list[Any],
) -> Any:
    leaves: list[Any] = [None] * spec.num_leaves
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    for place, (is_known, value) in rest.items():
        number = value - len(arguments) if is_known else 0
        leaves[place] = value if not is_known else arguments[value] if number < 0 else leaves[number]
    return put_together(tree_unflatten(leaves, spec))


def _in_words(leaf: Any, known: list[Any]) -> tuple[bool, Any]:
    """An object: its place among arguments of a layer and what it has returned before, or else the object itself."""
    place = next((place for place, each in enumerate(known) if each is leaf), None)
    is_known = place is not None and not isinstance(leaf, bool | int | float | str | None)
    return is_known, place if is_known else leaf


def _has_slots(container: Any, _: list[Any]) -> bool:
    return is_record(container) and not hasattr(container, "__dict__")


def _advance(draws: bool) -> None:
    """Let the stream that all ranks share go on where a layer has drawn: the next one draws other numbers."""
    if draws:
        pass_number()


def _device_of(leaves: list[Any]) -> torch.device:
    return next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), torch.device("cpu"))


_SLOTS = (
    "{} changes an argument, a {} with slots, of which other pipeline stages have their own; let the layer return "
    "another one, leave out slots=True, or give pipeline=1"
)

_FOREIGN = (
    "{} is given something that depends on {}, a parameter of a layer that only another pipeline stage has; compute it "
    "inside of that layer, or give pipeline=1"
)

_LOSS = (
    "the loss depends on {}, a parameter of a layer that only another pipeline stage has; use it inside of its layer, "
    "or give pipeline=1"
)
