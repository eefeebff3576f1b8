"""Replay of recorded operations: in their order, each storage freed as soon as it is done."""

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
    """A recorded tensor, as a window onto a storage.

    Attributes:
        storage: The number of the storage.
        dtype: Of the tensor.
        size: Of the tensor.
        stride: Of the tensor, in elements.
        offset: Of its first element in the storage, in elements.
        num_bytes: The size of the storage.
    """

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
    """A recorded call that fills storages.

    Attributes:
        function: An operation of `torch.ops.aten`, or an initializer.
        args: Its arguments, with windows in place of tensors.
        kwargs: Those by name.
        outputs: Its results, as windows.
        reads: The storages that it reads.
        writes: The storages that it writes.
        overwrites: The storage that it overwrites completely, if there is one; not among `reads`.
        is_random: Whether it draws random numbers.
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
        """All storages that it reads or writes."""
        return self.reads | self.writes


class Memory:
    """The storages that are real at the moment."""

    def __init__(self) -> None:
        self._real: dict[int, Any] = {}

    def view(self, window: Window) -> Tensor:
        """Return the real tensor of a window; its storage is made, unfilled, if it is not real yet."""
        if window.storage not in self._real:
            memory = torch.empty(window.num_bytes, dtype=torch.uint8, device="cpu")
            self._real[window.storage] = memory.untyped_storage()
        real = self._real[window.storage]
        return torch.empty(0, dtype=window.dtype, device="cpu").set_(real, window.offset, window.size, window.stride)

    def run(self, operation: Operation) -> None:
        """Run a recorded operation for real."""
        args, kwargs = tree_map_only(Window, self.view, (operation.args, operation.kwargs))
        result = operation.function(*args, **kwargs)
        given = tree_leaves((operation.args, operation.kwargs))
        inputs = {window.storage for window in given if isinstance(window, Window)}
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for window, value in zip(operation.outputs, leaves, strict=bool(operation.outputs)):
            # Results in a storage of the inputs are views or writes in place, and there already.
            if window.storage not in inputs:
                self.view(window).copy_(value)

    def free(self, storage: int) -> None:
        """Give the memory of a storage back."""
        self._real.pop(storage, None)


def replay(operations: Sequence[Operation], *, wanted: Iterable[int], deliver: Callable[[int, Memory], None]) -> None:
    """Run all operations; a storage is delivered and freed after the last one that touches it.

    It is also freed earlier, where the next operation that touches it overwrites it completely.

    Args:
        operations: In the order of recording.
        wanted: Storages of the module. One that no operation touches was made empty and never filled, and is delivered
            so, as an eager build leaves it.
        deliver: Called with the number of a finished storage, and the memory that has it.
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
    """Find, for each operation, the storages that no later one touches, and those that the next one overwrites."""
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
    """Put a value in the place of a tensor on the meta device: sharded if that is a DTensor, once if it is tied.

    Args:
        module: The module.
        name: Of the parameter, buffer or attribute.
        value: The whole tensor.
        device: The device of whole tensors.
        shards_on: The device of shards.
        made: Meta tensor -> its replacement so far; grows with each call.
    """
    path, _, attribute = name.rpartition(".")
    holder = module.get_submodule(path)
    present = getattr(holder, attribute)
    if not present.is_meta:
        return
    if present not in made:
        value = value.detach().clone() if value.device == device else value.detach().to(device)
        # Without a source rank, every rank takes its part of its own copy: no communication.
        if isinstance(present, DTensor):
            value = distribute_tensor(value, present.device_mesh, present.placements, src_data_rank=None).to(shards_on)
        is_parameter = isinstance(present, nn.Parameter)
        made[present] = nn.Parameter(value, requires_grad=present.requires_grad) if is_parameter else value
    if attribute in holder._buffers:
        holder._buffers[attribute] = made[present]
    else:
        setattr(holder, attribute, made[present])
