"""Containers that context variables hold, in which code collects tensors from inside of layers.

Hooks of Hugging Face's models append the logits of routers and hidden states to lists in a `ContextVar`, from which the
model puts them beside its result. A trial run of a layer would leave its own there, and a layer on a part of something
the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from typing import Any

from torch import Tensor

from lightning_parallel import _torch
from lightning_parallel.module.object_state import CONTAINERS


def collecting_containers() -> list[Any]:
    """The containers that context variables hold at the moment, and those among their entries."""
    found = [value for value in copy_context().values() if type(value) in CONTAINERS]
    inner = [value for each in found if type(each) is dict for value in each.values() if type(value) in CONTAINERS]
    return [*found, *inner]


@_torch.modes.not_compiled
def collected_from_now() -> Collected | None:
    """Begin to note what is appended to lists of context variables; ``None`` where there are no such lists."""
    lists = [(each, len(each)) for each in collecting_containers() if type(each) is list]
    return Collected(lists) if lists else None


class Collected:
    """Tensors that are appended to lists.

    Args:
        lists: Each with its length so far.
    """

    def __init__(self, lists: list[tuple[list[Any], int]]) -> None:
        self._lists = lists

    @property
    def tensors(self) -> list[Tensor]:
        """Those that have been appended since."""
        return [entry for entries, length in self._lists for entry in entries[length:] if isinstance(entry, Tensor)]

    @_torch.modes.not_compiled
    def replace(self, change: Callable[[Tensor], Tensor]) -> None:
        """Put ``change(tensor)`` in the place of each of them."""
        for entries, length in self._lists:
            for index in range(length, len(entries)):
                if isinstance(entries[index], Tensor):
                    entries[index] = change(entries[index])


def replace_collected(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Put ``change(tensor)`` in the place of `tensor`, or a view of it, where it was appended last by a hook.

    Args:
        tensor: What may have been appended to a list.
        change: Makes of it what belongs there.
    """
    for entries in collecting_containers():
        last = entries[-1] if type(entries) is list and entries else None
        # FSDP2 hands a layer views of what the one before has returned.
        if isinstance(last, Tensor) and last.shape == tensor.shape and last.data_ptr() == tensor.data_ptr():
            entries[-1] = change(last)
