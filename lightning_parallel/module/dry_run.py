"""Undoing the side effects of a trial run of a layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from torch import nn

from lightning_parallel.module.collected import collecting_containers
from lightning_parallel.module.layer_logs import LayerLogs
from lightning_parallel.module.object_state import CONTAINERS, Contents, ObjectState


@contextlib.contextmanager
def side_effects_undone(layer: nn.Module) -> Iterator[None]:
    """When this closes, what `layer`, its submodules and what the user's hooks on them hold, keep is what it was.

    Hooks run: the layer may need what they do. Only what they collect is taken away again, also from lists that context
    variables hold.

    Args:
        layer: The layer that is about to run.
    """
    states: list[Contents | ObjectState] = [Contents(each) for each in collecting_containers()]
    logging: dict[int, nn.Module] = {}
    for child in layer.modules():
        states.append(ObjectState(child))
        tables = child._forward_pre_hooks, child._forward_hooks, child._backward_pre_hooks, child._backward_hooks
        for hook in chain.from_iterable(table.values() for table in tables):
            if not getattr(hook, "__module__", "").startswith(("torch.", "lightning_parallel.")):
                held = _held(hook)
                states += [state for holder in held for state in _states_of(holder)]
                logging |= {id(each): each for each in held if isinstance(each, nn.Module) and hasattr(each, "log")}
    try:
        with contextlib.ExitStack() as silent:  # Lightning takes a log in a step only, and keeps it
            for module in logging.values():
                silent.enter_context(LayerLogs(module).taken())
            yield
    finally:
        for state in states:
            state.restore()


def _held(hook: Callable[..., Any]) -> list[Any]:
    """The objects that a hook can write into: of its closure, its own, and those that it is called with."""
    if isinstance(hook, functools.partial):
        return [*hook.args, *hook.keywords.values(), *_held(hook.func)]
    cells = getattr(hook, "__closure__", None) or getattr(getattr(hook, "__func__", None), "__closure__", None) or ()
    found = [cell.cell_contents for cell in cells if not _is_empty(cell)]
    return [*found, getattr(hook, "__self__", hook)]


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _states_of(holder: Any) -> list[Contents | ObjectState]:
    if type(holder) in CONTAINERS:
        return [Contents(holder)]
    if not isinstance(getattr(holder, "__dict__", None), dict):  # a class's own is no dict that can be written into
        return []
    return [ObjectState(holder, lambda name, _: not name.startswith("_"))]
