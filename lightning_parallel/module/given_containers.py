"""Lists, dictionaries and dataclasses that a layer is given and changes: its caller's, where it was given copies.

Layers append losses to a list of the step's, or put states into its dictionary. What takes arguments apart to change
tensors among them, as FSDP2 does, gives the layer other containers, which nobody reads afterwards.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from lightning_parallel.module.object_state import DEEPEST, MOST_ENTRIES

_LISTS = (list, deque)
_DICTS = (dict, OrderedDict, defaultdict)


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
        self._pairs = [pair for pair in _pairs(given, used) if pair[0] is not pair[1]]
        self._before = [_contents(copy) for _, copy in self._pairs]
        self._own: dict[int, Any] = {}
        for (own, copy), before in zip(self._pairs, self._before, strict=True):
            self._own[id(copy)] = own
            self._own |= {id(each): mine for each, mine in zip(before.values(), _contents(own).values(), strict=False)}

    def give_back(self) -> None:
        """Let the caller's containers have what the layer has changed in its own."""
        for own, now in self._changed():
            values = {key: self._own.get(id(value), value) for key, value in now.items()}
            if _is_record(own):
                for name, value in values.items():
                    object.__setattr__(own, name, value)
                continue
            own.clear()
            if isinstance(own, dict):
                own.update(values)
            else:
                own.extend(values.values())

    def changed_kinds(self) -> list[str]:
        """The classes of the containers that the layer has changed."""
        return sorted({type(own).__name__ for own, _ in self._changed()})

    def _changed(self) -> Iterator[tuple[Any, dict[Any, Any]]]:
        """The caller's containers that have changed in the layer, and what they have there now."""
        for (own, copy), before in zip(self._pairs, self._before, strict=True):
            now = _contents(copy)
            if now.keys() != before.keys() or any(now[key] is not before[key] for key in now):
                yield own, now


def giving_back(given: Any, used: Any) -> Callable[[], None] | None:
    """What a caller's containers need behind a layer; ``None`` if there are none.

    Args:
        given: Arguments.
        used: The same, as the layer gets them, before it runs.
    """
    return GivenContainers(given, used).give_back if has_containers(given) else None


def has_containers(values: Any, depth: int = 0) -> bool:
    """Whether there are lists, dictionaries or dataclasses among arguments, which a layer may change.

    Args:
        values: Arguments by position and by name.
        depth: How deep they are.
    """
    if isinstance(values, Tensor | str) or depth == DEEPEST:
        return False
    if depth > 1 and (type(values) in (*_LISTS, *_DICTS) or _is_record(values)):  # not the arguments themselves
        return True
    return any(has_containers(each, depth + 1) for each in _contents(values).values())


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type | nn.Module)


def _pairs(given: Any, used: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if given is used or isinstance(given, Tensor | str) or depth == DEEPEST or type(given) is not type(used):
        return
    if type(given) in (*_LISTS, *_DICTS) or _is_record(given):
        yield given, used
    theirs = _contents(used)
    for key, each in _contents(given).items():
        if key in theirs:
            yield from _pairs(each, theirs[key], depth + 1)


def _contents(container: Any) -> dict[Any, Any]:
    """What is in a container, by key, number or name; nothing in other objects, and in tables of data."""
    if _is_record(container):
        return {field.name: getattr(container, field.name, None) for field in fields(container)}
    if not isinstance(container, tuple | list | dict | deque) or len(container) > MOST_ENTRIES:
        return {}
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))
