"""Lists, dictionaries and dataclasses that a layer is given and changes: its caller's, where it was given copies.

Layers append losses to a list of the step's, or put states into its dictionary. What takes arguments apart to change
tensors among them, as FSDP2 does, gives the layer other containers, which nobody reads afterwards.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.module.object_state import DEEPEST, MOST_ENTRIES

_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (*_LISTS, *_DICTS)
_MUTE = (Tensor, str, int, float, type(None), nn.Module)
"""Most arguments, in which there is nothing to look for."""
_NO_RECORDS = (type, nn.Module, Tensor)
_WORDS = (str, bool, type(None))
"""Values that all ranks set alike."""


class GivenContainers:
    """Containers of a caller, and the copies of them with which a layer is called.

    Args:
        given: Arguments, in nested containers.
        used: The same, as the layer gets them, before it runs.

    Example:
        >>> containers = GivenContainers((hidden, losses), used)
        >>> layer(*used)
        >>> containers.give_back()  # what the layer has appended is in `losses`
    """

    def __init__(self, given: Any, used: Any) -> None:
        self._pairs = [(own, copy, _entries(own), _entries(copy)) for own, copy in _pairs(given, used)]

    def give_back(self, changes: Mapping[int, Any] | None = None) -> None:
        """Let the caller's containers have what the layer has changed in its own, and nothing else.

        Args:
            changes: The number of a value by `id` -> another one in its place.
        """
        changed = list(self._changed())
        if not changed:
            return
        own_of: dict[int, Any] = {}
        for own, copy, mine, before in self._pairs:
            own_of |= {id(copied): each for copied, each in zip(_values(before), _values(mine), strict=True)}
            own_of[id(copy)] = own
        own_of |= changes or {}
        for own, before, now in changed:
            _change(own, before, now, lambda value: own_of.get(id(value), value))

    def run_behind(self, after: Callable[[Any], Any], output: Any) -> Any:
        """Give back, with what `after` makes of a layer's output and of tensors with a graph that go with it.

        Args:
            after: Notes tensors to which backward comes first, and may cast them.
            output: What the layer returns.
        """
        news = [value for _, before, now in self._changed() for value in _news(before, now)]
        tensors = [each for each in tree_leaves(news) if isinstance(each, Tensor) and each.requires_grad]
        output, found = after((output, tensors))
        self.give_back({id(tensor): each for tensor, each in zip(tensors, found, strict=True)})
        return output

    def changed(self, counts: Callable[[Any, list[Any]], bool]) -> list[str]:
        """The classes of the containers that the layer has changed.

        Args:
            counts: Whether a container counts, by itself and by what is new in it.
        """
        return sorted({type(own).__name__ for own, before, now in self._changed() if counts(own, _news(before, now))})

    def _changed(self) -> Iterator[tuple[Any, Any, Any]]:
        """The caller's containers that have changed in the layer; what the copy had, and has."""
        for own, copy, _, before in self._pairs:
            now = _entries(copy)
            same = len(now) == len(before) and all(map(operator.is_, _values(now), _values(before)))
            if not same or (isinstance(now, dict) and now.keys() != before.keys()):
                yield own, before, now


def giving_back(given: Any, used: Any) -> Callable[[Callable[[Any], Any], Any], Any] | None:
    """A function to run behind a layer, around what runs there anyway; ``None`` if that alone has to.

    Args:
        given: Arguments.
        used: The same, as the layer gets them, before it runs.
    """
    return GivenContainers(given, used).run_behind if has_containers(given) else None


def has_containers(given: Sequence[Any]) -> bool:
    """Whether there are containers among arguments, which a layer may change.

    Args:
        given: Arguments by position, and by name.
    """
    args, kwargs = given
    return any(map(_holds_any, args)) or any(map(_holds_any, kwargs.values()))


def is_of_words(_: Any, news: list[Any]) -> bool:
    """Whether what is new in a container is text and flags, which all ranks set alike.

    Args:
        _: The container.
        news: What is new in it.
    """
    return all(isinstance(leaf, _WORDS) for leaf in tree_leaves(news))


def _holds_any(value: Any, depth: int = 0) -> bool:
    if isinstance(value, _MUTE) or depth == DEEPEST:
        return False
    if type(value) in _CONTAINERS or is_record(value):
        return True
    return isinstance(value, tuple) and any(_holds_any(each, depth + 1) for each in value)


def is_record(value: Any) -> bool:
    """Whether it is an instance of a dataclass that holds values, and no module.

    Args:
        value: Anything.
    """
    return is_dataclass(value) and not isinstance(value, _NO_RECORDS)


def _pairs(given: Any, used: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if given is used or isinstance(given, _MUTE) or depth > DEEPEST or type(given) is not type(used):
        return
    is_container = type(given) in _CONTAINERS or is_record(given)
    if is_container:
        yield given, used
    if is_container or isinstance(given, tuple):
        mine, theirs = _entries(given), _entries(used)
        if len(mine) == len(theirs) <= MOST_ENTRIES:
            for each, copied in zip(_values(mine), _values(theirs), strict=True):
                yield from _pairs(each, copied, depth + 1)


def _entries(container: Any) -> Any:
    """A list or a dictionary of what is in a container."""
    if isinstance(container, dict):
        return dict(container)
    if is_record(container):
        return {field.name: getattr(container, field.name, None) for field in fields(container)}
    return list(container)


def _values(entries: Any) -> Any:
    return entries.values() if isinstance(entries, dict) else entries


def _news(before: Any, now: Any) -> list[Any]:
    if isinstance(now, dict):
        return [value for key, value in now.items() if key not in before or before[key] is not value]
    known = set(map(id, before))
    return [value for value in now if id(value) not in known]


def _change(own: Any, before: Any, now: Any, own_of: Callable[[Any], Any]) -> None:
    """Do to a container what was done to a copy of it; others may have changed it meanwhile."""
    if isinstance(now, dict):
        changed = {key: own_of(each) for key, each in now.items() if key not in before or before[key] is not each}
        if not isinstance(own, dict):
            for name, value in changed.items():
                object.__setattr__(own, name, value)
            return
        for key in before.keys() - now.keys():
            own.pop(key, None)
        own.update(changed)
    elif len(now) >= len(before) and all(map(operator.is_, now, before)):
        own.extend(map(own_of, now[len(before) :]))
    else:
        values = [own_of(each) for each in now]
        own.clear()
        own.extend(values)
