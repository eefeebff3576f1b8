"""Undoing the side effects of a trial run of a layer."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from contextvars import copy_context
from itertools import chain
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.module.collected import collecting_containers
from lightning_parallel.module.held_modules import modules_in
from lightning_parallel.module.held_objects import FRAMEWORKS, HeldObjects, has_state
from lightning_parallel.module.layer_logs import LayerLogs
from lightning_parallel.module.object_state import CONTAINERS, Contents, ObjectState

_TABLES = frozenset(vars(nn.Module()))


@contextlib.contextmanager
def side_effects_undone(layer: nn.Module, given: Any = ()) -> Iterator[None]:
    """When this closes, what `layer`, its submodules and what the user's hooks on them hold, keep is what it was.

    Hooks run: the layer may need what they do. Only what they collect is taken away again, also from lists that context
    variables hold. So is what the layer itself puts into modules and objects to which it refers, into variables of its
    file, and into objects that it is given.

    Args:
        layer: The layer that is about to run.
        given: Its arguments, in containers.
    """
    states: list[Contents | ObjectState | HeldObjects | _Variables] = [_Variables(), HeldObjects(layer.modules())]
    states += [Contents(each) for each in collecting_containers()]
    states += [ObjectState(each) for each in tree_leaves(given) if has_state(each)]
    inside = set(layer.modules())
    elsewhere = [holder for child in inside for holder in (*_outside(child, inside), *_globals(type(child)))]
    states += [state for holder in elsewhere for state in _states_of(holder)]
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


class _Variables:
    """The values of context variables, to be put back."""

    def __init__(self) -> None:
        self._before = list(copy_context().items())

    def restore(self) -> None:
        """Put those back that have been set since."""
        for variable, value in self._before:
            if variable.get(None) is not value:
                variable.set(value)


def _outside(child: nn.Module, inside: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Modules to which one refers, in lists and the like, as to the model around it."""
    for name, value in vars(child).items():
        if name not in _TABLES:
            yield from (each for _, each in modules_in(name, value, depth=2) if each not in inside)


def _globals(cls: type) -> Iterator[Any]:
    """Variables of the user's files that the forward of a module reads."""
    for base in cls.__mro__:
        forward = inspect.unwrap(vars(base).get("forward", None) or _Variables.restore)
        code = getattr(forward, "__code__", None)
        if code is not None and base.__module__.partition(".")[0] not in FRAMEWORKS:
            names = [name for name in code.co_names if name in forward.__globals__]
            yield from (forward.__globals__[name] for name in names if _is_kept(forward.__globals__[name]))


def _is_kept(value: Any) -> bool:
    return type(value) in CONTAINERS or has_state(value)


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
