"""What code leaves behind when a layer is run for what it tells, and not for its result. Layer 0."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_parallel.module.object_state import CONTAINERS, Contents, ObjectState


@contextlib.contextmanager
def side_effects_undone(layer: nn.Module) -> Iterator[None]:
    """When this closes, what `layer`, its submodules and what the user's hooks on them hold, keep is what it was.

    Hooks run: the layer may need what they do. Only what they collect is taken away again.

    Args:
        layer: The layer that is about to run.
    """
    holders: list[Any] = list(layer.modules())
    for child in layer.modules():
        for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values()):
            if not getattr(hook, "__module__", "").startswith(("torch.", "lightning_parallel.")):
                holders += _held(hook)
    before = [_state_of(holder) for holder in holders if type(holder) in CONTAINERS or _has_attributes(holder)]
    try:
        yield
    finally:
        for state in before:
            state.restore(keeps_new=isinstance(state, ObjectState))


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


def _has_attributes(holder: Any) -> bool:
    return isinstance(getattr(holder, "__dict__", None), dict)  # a class's own is no dict that can be written into


def _state_of(holder: Any) -> Contents | ObjectState:
    if type(holder) in CONTAINERS:
        return Contents(holder)
    return ObjectState(holder, lambda name, _: not name.startswith("_"))
