"""Blocks of which snapshots are built: what objects hold, to be put back into the same objects.

A module is a dict of attributes, some of which are dicts in turn: parameters, buffers, children, hooks. Whoever tries
something on a module chooses which of these it may change, and puts them back.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import _torch

CONTAINERS: tuple[type, ...] = (list, dict, set, defaultdict, deque, Counter)
"""Whose contents are put back, in attributes; not of other subclasses, which may do something of their own."""
DEEPEST = 4
"""Containers in containers that are looked into."""
MOST_ENTRIES = 4096
"""Entries of a container that are searched for containers and tensors; one that has more holds data."""
_MOST_NUMBERS = 1 << 16
"""Elements of a tensor in a container that is state; one that has more holds data."""


class Contents:
    """The entries of a dict, or the elements of a list or set.

    Args:
        container: What is going to change.
        counts: Which entries of a dict are put back, by name and value; by default all, in their order.
    """

    def __init__(self, container: Any, counts: Callable[[Any, Any], bool] | None = None) -> None:
        self._container = container
        self._counts = counts
        self._new: set[Any] | None = None
        self.before = container.copy() if counts is None else self._counted()
        """The values that it held."""

    def keep_changes(self) -> None:
        """Put back from now on only what has another value by now, and take away only what is new by now."""
        now = self._counted()
        self._new = now.keys() - self.before.keys()
        self.before = {k: v for k, v in self.before.items() if k in now and now[k] is not v}

    def restore(self, *, keeps_new: bool = False) -> None:
        """Put everything back, as often as needed.

        Args:
            keeps_new: Whether entries stay that were not there.
        """
        if not isinstance(self._container, dict):
            self._container.clear()
            (self._container.update if isinstance(self._container, set) else self._container.extend)(self.before)
            return
        if not keeps_new:
            for key in self._counted().keys() - self.before.keys() if self._new is None else self._new:
                self._container.pop(key, None)
        if self._counts is None and self._new is None and list(self._container) != list(self.before):
            self._container.clear()  # what went and came again would be the last
        # The method of a Counter adds, and a dict's does not know of the order of an OrderedDict.
        update = dict.update if isinstance(self._container, Counter) else type(self._container).update
        update(self._container, self.before)

    def _counted(self) -> dict[Any, Any]:
        return {k: v for k, v in self._container.items() if self._counts is None or self._counts(k, v)}


def tensors_inside(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors that are state: those among `values`, and small ones in containers there, which are no parameters."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        else:
            tensors = (each for each in _inside([value], CONTAINERS) if isinstance(each, Tensor))
            yield from (t for t in tensors if t.numel() <= _MOST_NUMBERS and not isinstance(t, nn.Parameter))


def _inside(values: Iterable[Any], containers: tuple[type, ...], depth: int = 0) -> Iterator[Any]:
    """`values`, and what is in containers among them, and in containers there."""
    for value in values:
        yield value
        if depth < DEEPEST and type(value) in (*containers, tuple) and len(value) <= MOST_ENTRIES:
            yield from _inside(value.values() if isinstance(value, dict) else value, containers, depth + 1)


class ObjectState:
    """The attributes of an object, and what is in the containers among them, nested ones included.

    Args:
        holder: The object.
        counts: Which attributes, by name and value; by default all.
        containers: Of which kinds of attributes the contents are put back, too.
    """

    def __init__(
        self,
        holder: Any,
        counts: Callable[[str, Any], bool] | None = None,
        *,
        containers: tuple[type, ...] = CONTAINERS,
    ) -> None:
        self.attributes = Contents(vars(holder), counts)
        held = _inside(self.attributes.before.values(), containers)
        self._contents = [Contents(value) for value in held if type(value) in containers]

    def restore(self, *, keeps_new: bool = False) -> None:
        """Put everything back, as often as needed.

        Args:
            keeps_new: Whether attributes stay that were not there.
        """
        self.attributes.restore(keeps_new=keeps_new)
        for contents in self._contents:
            contents.restore()


class Numbers:
    """The numbers in tensors, copied.

    Args:
        tensors: What is going to be written into.
        device: Where the copies are kept; by default, where the tensors are.
    """

    def __init__(self, tensors: Iterable[Tensor], device: str | None = None) -> None:
        self._copies = [(tensor, tensor.detach().to(device or tensor.device, copy=True)) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Write them back, as often as needed; not into tensors that have them already, which a graph may need.

        Counters of writes do not say which: kernels of BatchNorm write without counting.
        """
        for tensor, copy in self._copies:
            is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device == copy.device
            # Shards are not compared: that would be a collective.
            if not is_plain or not _torch.dense_parts.is_same(tensor, copy):
                _torch.dense_parts.write(tensor, copy)
