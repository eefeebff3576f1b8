"""Placement of parameters on the ranks of a pipeline, with placeholders on all other ranks.

A layer's parameters are on its stage. Parameters outside of the layers are on the stage that uses them, which is
guessed from the order of registration at first, and known from tracing a step before the first one runs. A parameter
that several stages use (tied weights, parameters of the module itself) is on all of them, and its gradient is the sum
of theirs.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.module.layer_stacks import first_names
from lightning_parallel.module.placeholders import (
    PlaceholderReadError,
    PlaceholderWriteError,
    placeholder_parameter,
)
from lightning_parallel.ranks.stage_owners import StageOwners
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter, StageExit
from lightning_parallel.techniques.pipeline.routing_refusals import reading, writing
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.side_inputs import Traced
from lightning_parallel.techniques.pipeline.stage_plan import BEFORE_THE_STACK, StagePlan, StepCosts, balanced
from lightning_parallel.techniques.pipeline.turns import DisorderError

Positions = dict[str, frozenset[int]]
"""Name of a parameter or buffer -> where in a step it is used (see `BEFORE_THE_STACK`)."""


@dataclass(frozen=True)
class Placement:
    """Result of tracing one step, by which a module is cut anew.

    Args:
        layers: The paths of the layers of all stacks, in the order in which the step calls them.
        positions: Where in the step each parameter is used.
        costs: The measured costs of layers, if there are any.
        known: What passes from stage to stage, if it is known.
        takes_turns: Whether stages take turns (`turns.py`), each of which has all that is outside of the layers.
    """

    layers: tuple[str, ...]
    positions: Positions
    costs: StepCosts | None = None
    known: Traced | None = None
    takes_turns: bool = False


def placed_by_registration(module: nn.Module, layers: Sequence[str]) -> Placement:
    """Guess where parameters and buffers are used, from the order of registration; tied ones share all places.

    Args:
        module: The whole module.
        layers: The paths of the layers of all stacks, in the order in which a step calls them.
    """
    last = len(layers) - 1
    found: dict[Tensor, set[int]] = defaultdict(set)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    order = {path: index for index, (path, _) in enumerate(module.named_modules())}
    first = first_names(module)
    for name, tensor in named:
        path = first[name].rpartition(".")[0]
        if own := [i for i, at in enumerate(layers) if path == at or path.startswith(f"{at}.")]:
            found[tensor].update(own)
        # A module around the stack may use its own parameters before the stack, after it, or both.
        elif not path or any(at.startswith(f"{path}.") for at in layers):
            found[tensor] |= {BEFORE_THE_STACK, last}
        else:  # what stands between layers, in one container with them, runs where the layer before it has run
            before = (i for i, at in enumerate(layers) if order[at] < order[path])
            found[tensor].add(max(before, default=BEFORE_THE_STACK))
    return Placement(tuple(layers), {name: frozenset(found[tensor]) for name, tensor in named})


def placement_in_turns(module: nn.Module, layers: Sequence[str]) -> Placement:
    """Place layers on their stages, and all else on every rank: outside of the layers all ranks compute the same.

    Args:
        module: The whole module.
        layers: The paths of the layers of all stacks.
    """
    of_layers: dict[Tensor, set[int]] = defaultdict(set)
    for index, path in enumerate(layers):
        layer = module.get_submodule(path)
        for tensor in (*layer.parameters(), *layer.buffers()):
            of_layers[tensor].add(index)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    everywhere = range(BEFORE_THE_STACK, len(layers))
    positions = {name: frozenset(of_layers.get(tensor, everywhere)) for name, tensor in named}
    return Placement(tuple(layers), positions, takes_turns=True)


def plan_stages(module: nn.Module, placement: Placement, policy: PipelinePolicy, num_ranks: int) -> StagePlan:
    """Divide the layers of `module` into stages; changes nothing.

    Args:
        module: The whole module.
        placement: Their order, where parameters are used, and the costs of layers.
        policy: The rules.
        num_ranks: Ranks that share the layers.
    """
    if isinstance(policy.stages, str):
        costs = placement.costs or _parameter_counts(module, placement)
        if placement.takes_turns:  # every rank has the rest
            costs = StepCosts(costs.layers, 0, 0)
        counts = balanced(costs, policy.num_stages(num_ranks))
    else:
        counts = tuple(policy.stages)
    return StagePlan(num_ranks, tuple(accumulate(counts)), is_v=policy.is_v)


def _parameter_counts(module: nn.Module, placement: Placement) -> StepCosts:
    inside = tuple(f"{path}." for path in placement.layers)
    sizes = [sum(p.numel() for p in module.get_submodule(path).parameters()) for path in placement.layers]
    last = len(sizes) - 1
    around = {BEFORE_THE_STACK: 0, last: -sizes[last]}
    for name, parameter in module.named_parameters():
        where = placement.positions[name]
        for position in where & around.keys():
            around[position] += parameter.numel()
        # Between layers; what the first or the last stage has anyway is no reason to move a cut.
        if not where & around.keys() and not name.startswith(inside):
            for position in where:
                sizes[position] += parameter.numel()
    return StepCosts(tuple(sizes), first=around[BEFORE_THE_STACK], last=around[last])


def hold(module: nn.Module, positions: Positions, plan: StagePlan, **groups: Any) -> dict[str, StageOwners]:
    """Map names of parameters and buffers to owner ranks. The last stage owns buffers that several stages have.

    Args:
        module: The whole module.
        positions: Where parameters and buffers are used.
        plan: The stages and their ranks.
        groups: The groups that `StageOwners` takes.
    """
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    known: dict[tuple[int, ...], StageOwners] = {}
    owners_by_name = {}
    for name, where in positions.items():
        ranks = plan.ranks_at(where)
        ranks = ranks[::-1] if name in buffers else ranks
        owners_by_name[name] = known.setdefault(ranks, StageOwners(ranks, **groups))
    return owners_by_name


def release(module: nn.Module, owners_by_name: Mapping[str, StageOwners], device: torch.device) -> None:
    """Replace parameters of other stages by placeholders, in place, and free their memory.

    Args:
        module: The whole module.
        owners_by_name: The owner ranks of each parameter.
        device: The device that placeholders report.
    """
    placeholders: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not owners_by_name[name].is_here:
            if parameter not in placeholders:
                placeholders[parameter] = placeholder_parameter(parameter, name, device, owners_by_name[name].ranks)
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, placeholders[parameter])


# Tracing ------------------------------------------------------------------------------------------------------------


def trace_positions(module: nn.Module, router: LayerRouter, called: str, step: Callable[[], Any]) -> Positions | None:
    """Find where a step uses each parameter, by running it on placeholders; its changes to the module are undone.

    Returns:
        Name of a parameter -> the positions; ``None`` for a step that calls no layer at all.

    Args:
        module: The whole module.
        router: The router of its stack, which learns the side inputs.
        called: The step's name.
        step: The user's step on a microbatch.

    Raises:
        ConfigurationError: For a step that does not go through the stack from first to last, once.
    """
    aliases: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases[parameter].append(name)
    groups, first = {name: names for names in aliases.values() for name in names}, first_names(module)
    used: dict[str, set[int]] = defaultdict(set)

    def touch(name: str) -> None:
        if not router.is_in_layer and all(router.has(first[alias]) for alias in groups[name]):
            raise ConfigurationError([_read_outside(name)])
        for alias in groups[name]:
            used[alias].add(router.position)

    has_returned = False
    with unchanged(module), router.traced(called, module, touch), contextlib.suppress(_ReadError):
        with _reading_ends_it(router):
            step()
        has_returned = True
    if has_returned and router.position == BEFORE_THE_STACK:
        return None
    if has_returned:
        router.check_end()
    return {name: frozenset(positions) for name, positions in used.items()}


def _read_outside(name: str) -> str:
    return (
        f"the step uses {name} outside of the layer that owns it (a penalty over parameters(), a weight that is used "
        "twice), where a pipeline stage does not have it; compute it inside of the layer, or give pipeline=1"
    )


_GRADIENTS = (
    "the step takes gradients by itself (torch.autograd.grad) of what layers of the stack return, which other pipeline "
    "stages compute; take them of what comes after the stack, or give schedule='turns' or pipeline=1"
)


class _ReadError(Exception):
    """End of a trace at a value that the step reads after the stack, where a real step has one."""


@contextlib.contextmanager
def _reading_ends_it(router: LayerRouter) -> Iterator[None]:
    try:
        yield
    except StageExit:
        raise AssertionError("a trace leaves no stage") from None
    except Exception as error:
        # After the last layer, a trace only fails because placeholders have no values: what it saw so far is right.
        is_refused = isinstance(error, ConfigurationError) and not isinstance(error, PlaceholderReadError)
        if is_refused or router.position < router.plan.num_layers - 1:
            # Torch's words for `torch.autograd.grad` of a placeholder, which has no graph.
            check([_GRADIENTS] if "require grad" in str(error) else [])
            if isinstance(error, PlaceholderReadError):
                is_written = isinstance(error, PlaceholderWriteError)
                raise DisorderError([writing("the step") if is_written else reading(str(error))]) from error
            raise
        raise _ReadError from None


def corrected(before: Positions, traced: Positions, *, is_first: bool) -> Positions:
    """Correct positions by those that a trace found. They hold for any stages, as they are numbers of layers.

    Args:
        before: The positions that are assumed now.
        traced: The positions that the trace found.
        is_first: Whether `before` is a guess and not from a trace, so that one which is wrong is dropped.
    """
    found = {}
    for name, where in before.items():
        seen = traced.get(name, frozenset())
        # A guess of more places may be right: a trace ends where the step reads a value.
        found[name] = seen if is_first and not seen <= where else seen | where
    return found


def misplaced(positions: Positions, placed: Positions, plan: StagePlan) -> list[str]:
    """Names of parameters that a rank uses and does not hold.

    Args:
        positions: Where they are used.
        placed: By which positions they were placed.
        plan: The stages and their ranks.
    """
    return [name for name, where in positions.items() if set(plan.ranks_at(where)) - set(plan.ranks_at(placed[name]))]
