"""Values that the code of a layer leaves where a step may find them: in attributes, in lists, in context variables.

Routers of experts keep a loss in an attribute, forward hooks append what inner modules return to a list of the user's,
and Hugging Face's models collect logits of routers and attention weights in a context variable. A rank that does not
run the layer has to find the same at the same places.
"""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.module.held_modules import held_modules
from lightning_parallel.module.held_objects import FRAMEWORKS, has_state
from lightning_parallel.module.object_state import DEEPEST, MOST_ENTRIES
from lightning_parallel.module.placeholders import Placeholder

Place = tuple[str, ...]
"""The names that lead to a container: of a module, an attribute, a key; equal on all ranks."""
_PLAIN = (bool, int, float, str, type(None))
_DICTS = (dict, OrderedDict, defaultdict)
_LISTS = (list, deque)
_VARIABLE, _BUFFER, _ARGUMENT = "a context variable", "a buffer", "an argument"
_TABLES = frozenset(vars(nn.Module()))
_DERIVED = ("_g", "_orig")
"""Ends of names of parameters from which torch's hooks make a weight anew in each forward, as an attribute."""


class LeftValue(NamedTuple):
    """One value that a layer has left.

    Args:
        place: Where its container is.
        key: The name or key under which it is there; ``None`` where it was appended.
        value: Tensors and plain values, alone or in containers.
    """

    place: Place
    key: Any
    value: Any

    @property
    def name(self) -> str:
        """Where it is, in words."""
        names = (*self.place, *(() if self.key is None else (str(self.key),)))
        return ".".join(name for name in names if name not in ("", _BUFFER))

    @property
    def counts(self) -> bool:
        """Whether it is of numbers and text alone, such as a count of calls."""
        return self.place[0] != _VARIABLE and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(self.value))

    def is_inside(self, path: str) -> bool:
        """Whether it is in a module.

        Args:
            path: The path of the module.
        """
        return f"{self.place[0]}.".startswith(f"{path}.")


class LeftValues:
    """Finds what layers of a module leave.

    Args:
        module: The whole module.
        layers: The paths of the layers.

    Example:
        >>> before = LeftValues(module, ["blocks.0", "blocks.1"]).before(module.blocks[0])
        >>> hidden = module.blocks[0](hidden)
        >>> before.found()
        [LeftValue(place=('blocks.0',), key='aux_loss', value=tensor(0.1))]
    """

    def __init__(self, module: nn.Module, layers: Sequence[str]) -> None:
        self._paths = {child: path for path, child in module.named_modules()}
        inside = tuple(f"{path}." for path in layers)
        held = held_modules(module).items()
        self._outside = [(path, child) for path, child in held if not f"{path}.".startswith(inside)]

    def before(self, layer: nn.Module, used: Any = (), given: Any = ()) -> Before:
        """Note what is there before a layer runs.

        Args:
            layer: The layer.
            used: Its arguments, by position and by name, whose containers it may change.
            given: What its caller has given it, in containers of the caller's.
        """
        containers: dict[int, tuple[Place, Any]] = {}
        for place, container in itertools.chain(_of_arguments(used), self._containers(layer)):
            containers.setdefault(id(container), (place, container))
        return Before(dict(containers.values()), dict(_of_arguments(given)))

    def _containers(self, layer: nn.Module) -> Iterator[tuple[Place, Any]]:
        for variable, value in copy_context().items():
            yield from _inside((_VARIABLE, variable.name), value)
        for path, child in [*layer.named_modules(prefix=self._paths.get(layer, "")), *self._outside]:
            yield from _of_module(path, child)
        for child in layer.modules():
            yield from _of_hooks(self._paths.get(child, ""), child)


class Before:
    """The contents of containers before a layer ran.

    Args:
        containers: Place -> container.
        given: Place -> container of the caller, in place of a copy that the layer gets as an argument.
    """

    def __init__(self, containers: dict[Place, Any], given: dict[Place, Any]) -> None:
        self._containers, self._given = containers, given
        self._held = {place: _copy(container) for place, container in containers.items()}

    def found(self) -> list[LeftValue]:
        """The values that have been put there since; those in arguments are in the caller's containers from here on."""
        left = [
            LeftValue(place, key, value)
            for place, container in self._containers.items()
            for key, value in _news(container, self._held[place])
            if _is_plain(value)
        ]
        if copied := {place for place in self._given if self._containers.get(place) is not self._given[place]}:
            self._containers |= self._given
            self.put(each for each in left if each.place in copied)
        return left

    def put(self, left: Iterable[LeftValue], old: Iterable[Any] = ()) -> None:
        """Put values at their places, unless they are there.

        Args:
            left: The values.
            old: Those in whose place they are appended, if there are any.
        """
        for (place, key, value), before in zip(left, _or_nothing(old), strict=False):
            container = self._containers.get(place)
            if container is None:
                continue  # a container that the layer itself makes: it comes as a whole
            if key is not None:
                if isinstance(container, dict) or key < len(container):
                    container[key] = value
                if place[1:] == (_BUFFER,):  # until now it may have been an attribute, which would hide the buffer
                    self._containers.get(place[:1], {}).pop(key, None)
            elif (number := _index(container, before)) is not None:
                container[number] = value
            elif (before is _NOTHING or _has_tensors(before)) and _index(container, value) is None:
                container.append(value)

    def replace(self, left: Iterable[LeftValue], values: Iterable[Any]) -> None:
        """Put others in the place of values, where these still are.

        Args:
            left: What the layer has left.
            values: The others.
        """
        for (place, key, old), value in zip(left, values, strict=True):
            container = self._containers.get(place)
            if isinstance(container, dict):
                container.update({key: value} if container.get(key) is old else {})
            elif container is not None and (number := _index(container, old)) is not None:
                container[number] = value

    def put_back(self, left: Iterable[LeftValue]) -> None:
        """Let attributes and entries be what they were before the layer ran.

        Args:
            left: What it has left.
        """
        for place, key, _ in left:
            container, held = self._containers.get(place), self._held[place]
            if key is None or container is None or isinstance(held, int):
                continue
            if not isinstance(held, dict) or key in held:
                container[key] = held[key]
            else:
                container.pop(key, None)

    def take_away(self, left: Iterable[LeftValue]) -> None:
        """Take what was appended away again.

        Args:
            left: What a layer has left.
        """
        for place, key, value in left:
            container = self._containers.get(place)
            if key is None and container is not None and (number := _index(container, value)) is not None:
                del container[number]


_NOTHING = object()


def _or_nothing(old: Iterable[Any]) -> Iterator[Any]:
    yield from old
    while True:
        yield _NOTHING


def _index(container: Any, value: Any) -> int | None:
    """Where an object is in a list; plain values are no objects of their own."""
    if value is _NOTHING or not _has_tensors(value):
        return None
    return next((number for number in reversed(range(len(container))) if container[number] is value), None)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    return list(container) if len(container) <= MOST_ENTRIES else len(container)


def _news(container: Any, before: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values that are new in a container; ``None`` and the value where it was appended to a list."""
    if isinstance(container, dict):
        for key, value in container.items():
            if key in before and _is_same(before[key], value):
                continue
            if isinstance(key, _PLAIN) and key is not None and key not in _TABLES and not _is_derived(container, key):
                yield key, value
        return
    length = before if isinstance(before, int) else len(before)
    for number, value in enumerate(container):
        if number >= length:
            yield None, value
        elif not isinstance(before, int) and not _is_same(before[number], value):
            yield number, value


def _is_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    return isinstance(first, _PLAIN) and type(first) is type(second) and bool(first == second)


def _is_derived(container: dict[Any, Any], key: Any) -> bool:
    parameters = container.get("_parameters") or {}
    return any(f"{key}{end}" in parameters for end in _DERIVED)


def _is_plain(value: Any) -> bool:
    """Whether another rank can be given it: plain tensors, numbers and text."""
    leaves = tree_leaves(value)
    return all(type(leaf) in (Tensor, Placeholder) or isinstance(leaf, _PLAIN) for leaf in leaves)


# Where to look -------------------------------------------------------------------------------------------------------


def _of_arguments(values: Any) -> Iterator[tuple[Place, Any]]:
    """The containers among arguments, but for the tuple and the dictionary of the call itself."""
    for by in values:
        for name, value in by.items() if isinstance(by, dict) else enumerate(by):
            yield from _inside((_ARGUMENT, str(name)), value)


def _of_module(path: str, module: nn.Module) -> Iterator[tuple[Place, Any]]:
    attributes = vars(module)
    yield (path,), attributes
    if isinstance(attributes["_buffers"], dict):  # TorchScript's modules have another table
        yield (path, _BUFFER), attributes["_buffers"]
    for name, value in attributes.items():
        if name not in _TABLES:
            yield from _inside((path, name), value)


def _inside(place: Place, value: Any, depth: int = 0) -> Iterator[tuple[Place, Any]]:
    """The containers in a value, and in attributes of the user's objects there."""
    if depth == DEEPEST or isinstance(value, (Tensor, *_PLAIN)):
        return
    if type(value) in (*_DICTS, *_LISTS, tuple):
        if type(value) is not tuple:
            yield place, value
        if len(value) <= MOST_ENTRIES:
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                yield from _inside((*place, str(key)), each, depth + 1)
    elif _has_state(value):
        yield (*place, "attributes"), vars(value)
        for name, each in vars(value).items():
            yield from _inside((*place, name), each, depth + 1)


_kinds: dict[type, bool] = {}


def _has_state(value: Any) -> bool:
    """As `has_state`, which looks at the class only, and is asked here at each call of a layer."""
    kind = type(value)
    if kind not in _kinds:
        _kinds[kind] = has_state(value)
    return _kinds[kind]


def _of_hooks(path: str, module: nn.Module) -> Iterator[tuple[Place, Any]]:
    """Containers into which forward hooks of the user's may write: the variables that their code sees."""
    for number, hook in enumerate([*module._forward_pre_hooks.values(), *module._forward_hooks.values()]):
        if is_of_user(hook):
            for name, value in _seen_by(hook):
                if not isinstance(value, nn.Module):
                    yield from _inside((f"hook {number} of {path}", name), value)


def is_of_user(hook: Callable[..., Any]) -> bool:
    """Whether a hook is the user's, and no framework's."""
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
