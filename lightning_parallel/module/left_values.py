"""Values that the code of a layer leaves where a step may find them: in attributes, in lists, in context variables.

Routers of experts keep a loss in an attribute, forward hooks append what inner modules return to a list of the user's,
and Hugging Face's models collect logits of routers and attention weights in a context variable. A rank that does not
run the layer has to find the same at the same places.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextvars import copy_context
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.module.held_modules import held_modules
from lightning_parallel.module.left_places import (
    BUFFER,
    PLAIN,
    TABLES,
    VARIABLE,
    Place,
    inside_of,
    of_arguments,
    of_hooks,
    of_module,
)
from lightning_parallel.module.object_state import MOST_ENTRIES
from lightning_parallel.module.placeholders import Placeholder

REMOVED, REWRITTEN = "\0 removed", "\0 rewritten"
TAKEN = (REMOVED, REWRITTEN)
"""In place of a key: what was taken out of a dictionary, and all that is in a list of which something was."""
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
        names = (*self.place, *(() if self.key is None or self.key in TAKEN else (str(self.key),)))
        return ".".join(name for name in names if name not in ("", BUFFER))

    @property
    def counts(self) -> bool:
        """Whether it is of numbers and text alone, such as a count of calls."""
        return self.place[0] != VARIABLE and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(self.value))

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
        for place, container in itertools.chain(of_arguments(used), self._containers(layer)):
            containers.setdefault(id(container), (place, container))
        return Before(dict(containers.values()), dict(of_arguments(given)))

    def _containers(self, layer: nn.Module) -> Iterator[tuple[Place, Any]]:
        for variable, value in copy_context().items():
            yield from inside_of((VARIABLE, variable.name), value)
        for path, child in [*layer.named_modules(prefix=self._paths.get(layer, "")), *self._outside]:
            yield from of_module(path, child)
        for child in layer.modules():
            yield from of_hooks(self._paths.get(child, ""), child)


class Before:
    """The contents of containers before a layer ran.

    Args:
        containers: Place -> container.
        given: Place -> container of the caller, in place of a copy that the layer gets as an argument.
    """

    def __init__(self, containers: dict[Place, Any], given: dict[Place, Any]) -> None:
        self._containers, self._given = containers, given
        self._held = {place: _copy(container) for place, container in containers.items()}
        self._held_by_caller = {place: _copy(container) for place, container in given.items()}

    def found(self) -> list[LeftValue]:
        """The values that have been put there since; those in arguments are in the caller's containers from here on."""
        given = {place: container for place, container in self._given.items() if place in self._containers}
        copied = [place for place, container in given.items() if self._containers[place] is not container]
        taken = [each for place in copied for each in _taken(place, self._containers[place], self._held[place])]
        rewritten = {each.place for each in taken if each.key == REWRITTEN}
        left = [
            LeftValue(place, key, value)
            for place, container in self._containers.items()
            if place not in rewritten
            for key, value in _news(container, self._held[place])
        ]
        left = [each for each in (*left, *taken) if _is_plain(each.value)]
        if copied:
            self._containers |= given
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
            if key in TAKEN:
                _take(container, key, value, self._held_by_caller.get(place, ()))
                continue
            if key is not None:
                if isinstance(container, dict) or key < len(container):
                    container[key] = value
                if place[1:] == (BUFFER,):  # until now it may have been an attribute, which would hide the buffer
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


def _taken(place: Place, container: Any, before: Any) -> Iterator[LeftValue]:
    """Keys that the layer has taken out of a container that it was given, or all that is in a list instead."""
    if isinstance(before, dict):
        if gone := [key for key in before if key not in container and isinstance(key, PLAIN)]:
            yield LeftValue(place, REMOVED, gone)
    elif not isinstance(before, int) and len(container) < len(before):  # else it is enough to say what is where
        numbers = {id(value): number for number, value in enumerate(before)}
        kept = [(numbers.get(id(value)), None if id(value) in numbers else value) for value in container]
        yield LeftValue(place, REWRITTEN, kept)


def _take(container: Any, key: str, value: Any, before: Any) -> None:
    """Do to a container what `_taken` says of another one, by what was in it before."""
    if key == REMOVED:
        for each in value:
            container.pop(each, None)
        return
    old = list(before)
    container.clear()
    container.extend(each if number is None else old[number] for number, each in value)


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
            if isinstance(key, PLAIN) and key is not None and key not in TABLES and not _is_derived(container, key):
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
    return isinstance(first, PLAIN) and type(first) is type(second) and bool(first == second)


def _is_derived(container: dict[Any, Any], key: Any) -> bool:
    parameters = container.get("_parameters") or {}
    return any(f"{key}{end}" in parameters for end in _DERIVED)


def _is_plain(value: Any) -> bool:
    """Whether another rank can be given it: plain tensors, numbers and text."""
    leaves = tree_leaves(value)
    return all(type(leaf) in (Tensor, Placeholder) or isinstance(leaf, PLAIN) for leaf in leaves)
