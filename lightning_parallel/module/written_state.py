"""State that a step of the user's keeps in a module: buffers that it writes into, numbers and lists that it changes."""

from __future__ import annotations

import functools
import pickle
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.module.held_objects import has_state, stateful_objects
from lightning_parallel.module.placeholders import placeholder_like, placeholders_in

_VALUES = (bool, int, float, str, type(None))
_LISTS = (list, dict, set, deque)
_OF_TORCH = frozenset(vars(nn.Module()))
_MOST_ENTRIES = 4096
"""Entries of a list or dict that are looked at one by one; of longer ones, only the number."""
_MOST = 1 << 20
"""Numbers that are sent from one stage to the others after a step; more of them are data."""


class News(NamedTuple):
    """The contents of an attribute, or the entries of a list from a place on."""

    value: Any
    begin: int = 0


class WrittenState:
    """Notes what modules, and objects of the user's that they hold, have in attributes, to say later what has changed.

    A tensor that replaces another one counts, too: it may be of the last call only, or what the next step begins with.

    Args:
        modules: Path -> module.
        ignored: Names of attributes that a framework keeps for itself, besides those of `nn.Module`.

    Example:
        >>> state = WrittenState({"head": spectral_norm(nn.Linear(4, 4))})
        >>> ...  # a step
        >>> state.changed()
        ['head.parametrizations.weight.0._u', 'head.parametrizations.weight.0._v']
    """

    def __init__(self, modules: Mapping[str, nn.Module], ignored: Collection[str] = ()) -> None:
        self._ignored = _OF_TORCH.union(ignored)
        self._holders: dict[str, Any] = {**modules, **stateful_objects(modules)}
        self._before = dict(self._values())
        self._marks = {name: _mark(value) for name, value in self._before.items()}

    def changed(self) -> list[str]:
        """Names of buffers and attributes that have other contents now; of those that were there before only."""
        now = dict(self._values())
        return [name for name in self._before if name in now and self._is_changed(name, now[name])]

    def new_values(self) -> dict[str, Any]:
        """Attributes that were not there before and hold something now: caches, or what hooks and later steps read."""
        return {name: value for name, value in self._values() if name not in self._before}

    def of_samples(self, count: int) -> list[str]:
        """Names of attributes, other than buffers, that were tensors with a row for each of `count` samples."""
        return [
            name
            for name, value in self._before.items()
            if name not in self._buffers() and isinstance(value, Tensor) and value.shape[:1] == (count,)
        ]

    def news(self) -> dict[str, News]:
        """Contents of attributes that have changed, for `follow` of the same modules elsewhere; without buffers.

        Only numbers, text and tensors, alone or in containers; tensors in host memory. Of tensors that are too large
        for the state of a step, only the shape: what others then hold refuses to be read.
        """
        now, buffers = dict(self._values()), self._buffers()
        found = {}
        for name in (*self.changed(), *self.new_values()):
            if name not in buffers:
                value = now[name]
                if isinstance(value, Tensor) and value.numel() > _MOST:
                    found[name] = News(torch.empty_like(value, device="meta"))
                    continue
                begin = self._begin_of_new(name, value) if isinstance(value, list) else 0
                value = value[begin:] if begin else value
                if _is_plain(value):
                    found[name] = News(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), value), begin)
        return found

    def follow(self, news: Mapping[str, News], device: torch.device) -> None:
        """Let attributes hold what they hold elsewhere.

        Args:
            news: From `news`.
            device: Where tensors are wanted.
        """
        for name, (value, begin) in news.items():
            value = tree_map_only(Tensor, functools.partial(_received, name, device), value)
            path, _, attribute = name.rpartition(".")
            if path not in self._holders:
                continue  # in an object that has come as a whole
            own = vars(self._holders[path]).get(attribute)
            if isinstance(own, list) and isinstance(value, list):
                own[begin:] = value
            elif isinstance(own, dict):
                # Objects that are here have their own news, and whoever holds them finds these.
                held = {key: each for key, each in own.items() if key in value and has_state(each)}
                own.clear()
                own.update(value | held)
            elif isinstance(own, set | deque):
                own.clear()
                own.extend(value) if isinstance(own, deque) else own.update(value)
            else:
                setattr(self._holders[path], attribute, value)

    def _is_changed(self, name: str, value: Any) -> bool:
        if isinstance(value, Tensor) and value is not self._before[name]:
            return True
        return not _is_same(_mark(value), self._marks[name])

    def _begin_of_new(self, name: str, value: list[Any]) -> int:
        """The number of entries that were there before, where others have only been added behind them."""
        mark = self._marks.get(name)
        before = mark if isinstance(mark, list) else value[:mark] if isinstance(mark, int) else []
        return len(before) if _is_same(_mark(value[: len(before)]), mark) else 0

    def _buffers(self) -> set[str]:
        modules = [(path, holder) for path, holder in self._holders.items() if isinstance(holder, nn.Module)]
        return {_joined(path, name) for path, module in modules for name, _ in module._buffers.items()}

    def _values(self) -> Iterator[tuple[str, Any]]:
        for path, holder in self._holders.items():
            if isinstance(holder, nn.Module):
                yield from ((_joined(path, name), buffer) for name, buffer in holder.named_buffers(recurse=False))
            for name, value in vars(holder).items():
                if name not in self._ignored and isinstance(value, (*_VALUES, *_LISTS, Tensor)):
                    yield _joined(path, name), value


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _received(name: str, device: torch.device, tensor: Tensor) -> Tensor:
    return placeholder_like(tensor, name) if tensor.is_meta else tensor.to(device)


def _is_plain(value: Any) -> bool:
    """Whether it can be sent: numbers, text, tensors, and objects of the user's in dicts, which others may lack."""
    leaves = list(_leaves(value))
    if len(leaves) > _MOST or not all(isinstance(leaf, (*_VALUES, Tensor)) for leaf in leaves):
        return False
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return not placeholders_in(tensors) and sum(tensor.numel() for tensor in tensors) <= _MOST


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from _leaves(vars(each) if has_state(each) and _pickles(each) else each)
    elif isinstance(value, list | tuple | set | deque):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


def _pickles(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever its own methods raise
        return False
    return True


def _mark(value: Any) -> Any:
    """Something that is another one once `value` has been written into."""
    if isinstance(value, Tensor):
        return None if value.is_inference() else value._version
    if not isinstance(value, _LISTS):
        return value
    if len(value) > _MOST_ENTRIES:
        return len(value)
    entries = [each for item in value.items() for each in item] if isinstance(value, dict) else list(value)
    return [(each, _mark(each)) if isinstance(each, (Tensor, *_LISTS)) else each for each in entries]


def _is_same(first: Any, second: Any) -> bool:
    """Whether two marks are; tensors and objects in them are if they are the same ones."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if first is second:
        return True
    return type(first) is type(second) and isinstance(first, _VALUES) and bool(first == second)
