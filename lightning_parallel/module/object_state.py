"""Blocks of which snapshots are built: what objects hold, to be put back into the same objects.

A module is a dict of attributes, some of which are dicts in turn: parameters, buffers, children, hooks. Whoever tries
something on a module chooses which of these it may change, and puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

CONTAINERS: tuple[type, ...] = (list, dict, set)
"""Whose contents are put back, in attributes; not of subclasses, which may do something of their own."""


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
            (self._container.extend if isinstance(self._container, list) else self._container.update)(self.before)
            return
        if not keeps_new:
            for key in self._counted().keys() - self.before.keys() if self._new is None else self._new:
                self._container.pop(key, None)
        if self._counts is None and self._new is None and list(self._container) != list(self.before):
            self._container.clear()  # what went and came again would be the last
        self._container.update(self.before)

    def _counted(self) -> dict[Any, Any]:
        return {k: v for k, v in self._container.items() if self._counts is None or self._counts(k, v)}


class ObjectState:
    """The attributes of an object, and what is in the containers among them.

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
        self._contents = [Contents(value) for value in self.attributes.before.values() if type(value) in containers]

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
        """Write them back, as often as needed."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
