"""Order in which a step calls the layers of several stacks: that of registration is only a guess."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lightning_parallel.module.layer_stacks import Stack
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter
from lightning_parallel.techniques.pipeline.shape_inference import unchanged
from lightning_parallel.techniques.pipeline.turns import DisorderError


def called_layers(
    module: nn.Module,
    stacks: Sequence[Stack],
    router: LayerRouter,
    layers: tuple[str, ...],
    *,
    step: Callable[[], Any],
    drops: bool,
) -> tuple[tuple[str, ...], str]:
    """Find the layers that are to be cut, in order, and why no schedule fits the step; "" where one may.

    Args:
        module: The whole module.
        stacks: Its stacks.
        router: The router of its layers.
        layers: The paths of the layers, in the order of the router, which stays where the step shows none.
        step: The user's step on a microbatch.
        drops: Whether stacks that it does not call at all are no part of what is cut.
    """
    try:
        order = traced_order(module, stacks, router, layers, step=step, drops=drops)
        return order or layers, ""
    except DisorderError as error:
        return layers, str(error)


def traced_order(
    module: nn.Module,
    stacks: Sequence[Stack],
    router: LayerRouter,
    layers: Sequence[str],
    *,
    step: Callable[[], Any],
    drops: bool = True,
) -> tuple[str, ...] | None:
    """Find the order in which a step calls its layers, by running it on placeholders; its changes are undone.

    Args:
        module: The whole module.
        stacks: Its stacks.
        router: The router of its layers.
        layers: The paths of the layers, in the order of the router.
        step: The user's step on a microbatch.
        drops: Whether stacks that it does not call at all are no part of what is cut.

    Returns:
        The paths of the layers in the order of calls, without those of stacks that it does not call at all; ``None``
        where the step shows none: it fails on placeholders, or calls no layer, or those of a stack in another order
        than that of the stack.

    Raises:
        DisorderError: For a step that calls some layers of a stack, not each of them once.
    """
    has_ended = False
    # Why a step fails here, its trace will say.
    with unchanged(module), router.in_any_order(module) as calls, contextlib.suppress(Exception):
        step()
        has_ended = True
    order = tuple(layers[index] for index in calls)
    counts = Counter(order)
    # What a step that ends does not call, such as a copy of averages, is no part of what is cut.
    called = [stack for stack in stacks if not (has_ended and drops) or any(counts[layer] for layer in stack.layers)]
    right = [stack for stack in called if all(counts[layer] == stack.layers.count(layer) for layer in stack.layers)]
    if len(right) < len(called) or not right:
        if has_ended and right:
            raise DisorderError([_advice(called, right)])
        return None
    places = [[order.index(layer) for layer in stack.layers] for stack in called]
    return order if all(own == sorted(own) for own in places) else None


def _advice(stacks: Sequence[Stack], right: Sequence[Stack]) -> str:
    others = " and ".join(stack.path for stack in stacks if stack not in right)
    paths = ",".join(stack.path for stack in right)
    named = paths if len(right) == 1 else f"[{paths}]"
    return (
        f"the step does not call each layer of {others} once, as a pipeline needs of all that it cuts; give "
        f"layers={named}, which leaves {others} whole on the stage that calls it, or give pipeline=1"
    )
