"""What code leaves behind when a layer is run for what it tells, and not for its result. Layer 0."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


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
    before = [_contents(holder) for holder in holders]
    try:
        yield
    finally:
        for own, attributes, containers in before:
            own.update(attributes)
            for container, content in containers:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


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


def _contents(holder: Any) -> tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]:
    """A holder's attributes, a copy of them, and its lists and dicts with what is in them."""
    if type(holder) in (list, dict):
        return {}, {}, [(holder, holder.copy())]
    own = getattr(holder, "__dict__", {})
    if not isinstance(own, dict):  # a class's own is no dict that can be written into
        return {}, {}, []
    public = {name: value for name, value in own.items() if not name.startswith("_")}
    return own, public, [(value, value.copy()) for value in public.values() if type(value) in (list, dict)]
