"""Where to look for what a layer leaves: containers in attributes, in arguments, and in what hooks refer to."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_parallel.module.held_objects import FRAMEWORKS, has_state
from lightning_parallel.module.object_state import DEEPEST, MOST_ENTRIES

Place = tuple[str, ...]
"""The names that lead to a container: of a module, an attribute, a key; equal on all ranks."""
PLAIN = (bool, int, float, str, type(None))
"""Values that another rank can be told."""
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, deque)
VARIABLE, BUFFER, ARGUMENT = "a context variable", "a buffer", "an argument"
"""Beginnings and ends of places that are no attributes."""
TABLES = frozenset(vars(nn.Module()))
"""Attributes that all modules have."""


def of_arguments(values: Any) -> Iterator[tuple[Place, Any]]:
    """The containers among arguments, but for the tuple and the dictionary of the call itself.

    Args:
        values: Arguments by position, and by name.
    """
    for by in values:
        for name, value in by.items() if isinstance(by, dict) else enumerate(by):
            yield from inside_of((ARGUMENT, str(name)), value)


def of_module(path: str, module: nn.Module) -> Iterator[tuple[Place, Any]]:
    """The attributes and buffers of a module, and the containers among them.

    Args:
        path: The path of the module.
        module: The module.
    """
    attributes = vars(module)
    yield (path,), attributes
    if isinstance(attributes["_buffers"], dict):  # TorchScript's modules have another table
        yield (path, BUFFER), attributes["_buffers"]
    for name, value in attributes.items():
        if name not in TABLES:
            yield from inside_of((path, name), value)


def inside_of(place: Place, value: Any, depth: int = 0) -> Iterator[tuple[Place, Any]]:
    """The containers in a value, and in attributes of the user's objects there.

    Args:
        place: Where the value is.
        value: Anything.
        depth: In how many containers it is.
    """
    if depth == DEEPEST or isinstance(value, (Tensor, *PLAIN)):
        return
    if type(value) in (*_DICTS, *_LISTS, tuple):
        if type(value) is not tuple:
            yield place, value
        if len(value) <= MOST_ENTRIES:
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                yield from inside_of((*place, str(key)), each, depth + 1)
    elif _has_state(value):
        yield (*place, "attributes"), vars(value)
        for name, each in vars(value).items():
            yield from inside_of((*place, name), each, depth + 1)


_kinds: dict[type, bool] = {}


def _has_state(value: Any) -> bool:
    """As `has_state`, which looks at the class only, and is asked here at each call of a layer."""
    kind = type(value)
    if kind not in _kinds:
        _kinds[kind] = has_state(value)
    return _kinds[kind]


def of_hooks(path: str, module: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Containers into which forward hooks of the user's may write: the variables that their code sees.

    Args:
        path: The path of the module.
        module: The module.
    """
    for number, hook in enumerate([*module._forward_pre_hooks.values(), *module._forward_hooks.values()]):
        if is_of_user(hook):
            for name, value in _seen_by(hook):
                if not isinstance(value, nn.Module):
                    yield from inside_of((f"hook {number} of {path}", name), value)


def is_of_user(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the user's, and no framework's.

    Args:
        hook: The hook.
    """
    inner: Any = hook
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = getattr(inner, "__module__", None) or type(inner).__module__
    return name.partition(".")[0] not in FRAMEWORKS


def _seen_by(hook: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(hook, functools.partial):
        yield from ((f"argument {number}", value) for number, value in enumerate(hook.args))
        yield from hook.keywords.items()
        yield from _seen_by(hook.func)
        return
    yield "self", getattr(hook, "__self__", hook)
    function = getattr(hook, "__func__", hook)
    code = getattr(function, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing was put there so far
            continue
    yield from ((f"default {number}", value) for number, value in enumerate(function.__defaults__ or ()))
    yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)
