"""Doing for real what was noted on the meta device: in its order, a storage at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Window:
    """A noted tensor: a window onto a storage, which is known by a number."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether the window shows each element of its storage."""
        return torch.Size(self.size).numel() * self.dtype.itemsize == self.num_bytes


@dataclass(frozen=True)
class Operation:
    """A call that fills storages: windows stand for tensors in its arguments.

    Attributes:
        overwrites: The storage whose former content no longer matters after it, if there is one; not among `reads`.
    """

    function: Any
    args: Any
    kwargs: dict[str, Any]
    outputs: tuple[Window, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: int | None
    is_random: bool

    @property
    def storages(self) -> frozenset[int]:
        """All storages that it touches."""
        return self.reads | self.writes


class Memory:
    """The storages that are real at the moment."""

    def __init__(self) -> None:
        self._real: dict[int, Any] = {}

    def view(self, window: Window) -> Tensor:
        """The real tensor of a window, made empty if its storage is not real yet."""
        if window.storage not in self._real:
            self._real[window.storage] = torch.empty(window.num_bytes, dtype=torch.uint8).untyped_storage()
        real = self._real[window.storage]
        return torch.empty(0, dtype=window.dtype).set_(real, window.offset, window.size, window.stride)

    def run(self, operation: Operation) -> None:
        """Do for real what was noted."""
        args, kwargs = tree_map_only(Window, self.view, (operation.args, operation.kwargs))
        result = operation.function(*args, **kwargs)
        given = tree_leaves((operation.args, operation.kwargs))
        inputs = {window.storage for window in given if isinstance(window, Window)}
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for window, value in zip(operation.outputs, leaves, strict=bool(operation.outputs)):
            if window.storage not in inputs:
                self.view(window).copy_(value)

    def free(self, storage: int) -> None:
        """Give the memory of a storage back."""
        self._real.pop(storage, None)


def replay(operations: Sequence[Operation], *, wanted: Iterable[int], deliver: Callable[[int, Memory], None]) -> None:
    """Do all operations; a storage is delivered and freed after the last one that touches it.

    It is freed before that, too, where the next operation overwrites it whole. What of `wanted` no operation touches
    was made empty and never filled, and is delivered so, as an eager build leaves it.
    """
    memory = Memory()
    finished, idle = _ends_of_use(operations)
    for index, operation in enumerate(operations):
        memory.run(operation)
        for storage in finished[index]:
            deliver(storage, memory)
        for storage in finished[index] | idle[index]:
            memory.free(storage)
    touched = {storage for operation in operations for storage in operation.storages}
    for storage in wanted:
        if storage not in touched:
            deliver(storage, memory)


def _ends_of_use(operations: Sequence[Operation]) -> tuple[list[set[int]], list[set[int]]]:
    """For each operation, the storages that no later one touches, and those that the next one overwrites."""
    finished: list[set[int]] = [set() for _ in operations]
    idle: list[set[int]] = [set() for _ in operations]
    is_overwritten_next: dict[int, bool] = {}
    for index in reversed(range(len(operations))):
        for storage in operations[index].storages:
            if storage not in is_overwritten_next:
                finished[index].add(storage)
            elif is_overwritten_next[storage]:
                idle[index].add(storage)
            is_overwritten_next[storage] = operations[index].overwrites == storage
    return finished, idle


def put(
    module: nn.Module, name: str, value: Tensor, device: torch.device, shards_on: torch.device, made: dict[Any, Any]
) -> None:
    """Put a whole value in the place of the tensor `name`: cut, if a DTensor stands there; once, if it is tied.

    `made` is what stands in the place of each tensor so far, and grows.
    """
    path, _, attribute = name.rpartition(".")
    holder = module.get_submodule(path)
    present = getattr(holder, attribute)
    if not present.is_meta:
        return
    if present not in made:
        value = value.detach().clone() if value.device == device else value.detach().to(device)
        if isinstance(present, DTensor):
            value = distribute_tensor(value, present.device_mesh, present.placements, src_data_rank=None).to(shards_on)
        is_parameter = isinstance(present, nn.Parameter)
        made[present] = nn.Parameter(value, requires_grad=present.requires_grad) if is_parameter else value
    if attribute in holder._buffers:
        holder._buffers[attribute] = made[present]
    else:
        setattr(holder, attribute, made[present])
