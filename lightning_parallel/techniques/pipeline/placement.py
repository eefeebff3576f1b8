"""Which rank holds which parameter, and what follows from it: ghosts elsewhere, gradients summed.

A layer's parameters are on its stage. What is outside of the stack is on the stage that uses it: known by the order of
registration at first, and by tracing a step before the first one runs. A parameter that several stages use (tied
weights, parameters of the module itself) is held by all of them, and its gradient is the sum of theirs.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.layer_stacks import ModuleStructure
from lightning_parallel.module.placeholders import PlaceholderReadError, placeholder_parameter
from lightning_parallel.ranks.stage_owners import StageOwners
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter, StageExit
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.side_inputs import Beside
from lightning_parallel.techniques.pipeline.stage_plan import BEFORE_THE_STACK, StagePlan, StepCosts, balanced

Positions = dict[str, frozenset[int]]
"""Name of a parameter or buffer -> where in a step it is used (see `BEFORE_THE_STACK`)."""


@dataclass(frozen=True)
class Placement:
    """What a look at a step has shown, by which a module is cut anew.

    Args:
        positions: Where each parameter is used.
        costs: What layers take, if that was measured.
        beside: What passes from stage to stage beside hidden states.
    """

    positions: Positions
    costs: StepCosts | None = None
    beside: Beside | None = None


def positions_by_registration(module: nn.Module, structure: ModuleStructure) -> Positions:
    """Where parameters and buffers are used, as far as their order tells; aliases of one tensor have it in common."""
    (stack,) = structure.stacks
    last = len(stack.layers) - 1
    found: dict[Tensor, set[int]] = defaultdict(set)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    order = {path: index for index, (path, _) in enumerate(module.named_modules(remove_duplicate=False))}
    for name, tensor in named:
        path = name.rpartition(".")[0]
        layer = next((i for i, at in enumerate(stack.layers) if path == at or path.startswith(f"{at}.")), None)
        if layer is not None:
            found[tensor].add(layer)
        elif not path or f"{stack.path}.".startswith(f"{path}."):  # on a module around the stack: nobody knows when
            found[tensor] |= {BEFORE_THE_STACK, last}
        else:
            found[tensor].add(BEFORE_THE_STACK if order[path] < order[stack.path] else last)
    return {name: frozenset(found[tensor]) for name, tensor in named}


def plan_stages(
    module: nn.Module, structure: ModuleStructure, placement: Placement, policy: PipelinePolicy, num_ranks: int
) -> StagePlan:
    """Cut the stack of `module` into stages; changes nothing."""
    if isinstance(policy.stages, str):
        costs = placement.costs or _parameter_counts(module, structure, placement.positions)
        counts = balanced(costs, policy.num_stages(num_ranks))
    else:
        counts = tuple(policy.stages)
    return StagePlan(num_ranks, tuple(accumulate(counts)), is_v=policy.is_v)


def _parameter_counts(module: nn.Module, structure: ModuleStructure, positions: Positions) -> StepCosts:
    (stack,) = structure.stacks
    sizes = tuple(sum(p.numel() for p in module.get_submodule(path).parameters()) for path in stack.layers)
    outside: dict[int, int] = defaultdict(int)
    for name, parameter in module.named_parameters():
        for position in positions[name]:
            outside[position] += parameter.numel()
    return StepCosts(sizes, first=outside[BEFORE_THE_STACK], last=outside[len(sizes) - 1] - sizes[-1])


def hold(module: nn.Module, positions: Positions, plan: StagePlan, **groups: Any) -> dict[str, StageOwners]:
    """Who holds what. `groups` are those of `StageOwners`. The last stage owns buffers that all stages have."""
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    known: dict[tuple[int, ...], StageOwners] = {}
    owners_by_name = {}
    for name, where in positions.items():
        ranks = plan.ranks_at(where)
        ranks = ranks[::-1] if name in buffers else ranks
        owners_by_name[name] = known.setdefault(ranks, StageOwners(ranks, **groups))
    return owners_by_name


def release(module: nn.Module, owners_by_name: Mapping[str, StageOwners], device: torch.device) -> None:
    """Put ghosts in the place of parameters that are not held here, in place: no memory is left of them."""
    placeholders: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not owners_by_name[name].is_here:
            if parameter not in placeholders:
                placeholders[parameter] = placeholder_parameter(parameter, name, device)
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, placeholders[parameter])


# Tracing ------------------------------------------------------------------------------------------------------------


def trace_positions(module: nn.Module, router: LayerRouter, called: str, step: Callable[[], Any]) -> Positions:
    """Where a step uses which parameter, found by running it on ghosts; what it changes on the module is undone.

    Args:
        module: The whole module.
        router: The way through its stack; it learns what passes beside hidden states.
        called: The step's name.
        step: The user's step on a microbatch.

    Raises:
        ConfigurationError: For a step that does not go through the stack from first to last, once.
    """
    aliases: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases[parameter].append(name)
    groups = {name: names for names in aliases.values() for name in names}
    used: dict[str, set[int]] = defaultdict(set)

    def touch(name: str) -> None:
        if not router.is_in_layer and all(router.has(alias) for alias in groups[name]):
            raise ConfigurationError([_read_outside(name)])
        for alias in groups[name]:
            used[alias].add(router.position)

    has_returned = False
    with unchanged(module), router.traced(called, module, touch), contextlib.suppress(_ReadError):
        with _reading_ends_it(router):
            step()
        has_returned = True
    if has_returned:
        router.check_end()
    return {name: frozenset(positions) for name, positions in used.items()}


def _read_outside(name: str) -> str:
    return (
        f"the step uses {name} outside of the layer that owns it (a penalty over parameters(), a weight that is used "
        "twice), where a pipeline stage does not have it; compute it inside of the layer, or give pipeline=1"
    )


class _ReadError(Exception):
    """The step looked at a value behind the stack, which a trace does not have; a real step will."""


@contextlib.contextmanager
def _reading_ends_it(router: LayerRouter) -> Iterator[None]:
    try:
        yield
    except StageExit:
        raise AssertionError("a trace leaves no stage") from None
    except Exception as error:
        # Whatever fails behind the last layer fails for want of values: what was seen by then holds.
        is_refused = isinstance(error, ConfigurationError) and not isinstance(error, PlaceholderReadError)
        if is_refused or router.position < router.plan.num_layers - 1:
            raise
        raise _ReadError from None


def corrected(before: Positions, traced: Positions, plan: StagePlan, *, is_first: bool) -> Positions | None:
    """`before` with the places that a trace found; ``None`` if every stage holds already what it uses.

    Args:
        before: What is assumed now.
        traced: What the trace found.
        plan: Which stage is where.
        is_first: Whether `before` is not from a trace, so that a parameter leaves a place at which it is not used.
    """
    merged = {}
    is_wrong = False
    for name, where in before.items():
        seen = traced.get(name, frozenset())
        missing = set(plan.ranks_at(seen)) - set(plan.ranks_at(where)) if seen else set()
        is_wrong = is_wrong or bool(missing)
        merged[name] = (seen if is_first else seen | where) if missing else where
    return merged if is_wrong else None
