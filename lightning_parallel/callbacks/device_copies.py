"""Copies of batches to an accelerator, beside what it computes: from pinned memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

_STREAMED = ("cuda", "xpu")
"""Kinds of devices with streams and pinned memory."""


def copies_aside(device: torch.device) -> bool:
    """Whether `device` copies while it computes."""
    return device.type in _STREAMED


class DeviceCopies:
    """Copies the tensors of batches on a stream of their own, and lets the stream of the training wait for them.

    Containers are lists, tuples and dictionaries. What else a batch has stays as it is, and is copied later, as without
    this: memory of tensors that nobody can see might be used again too early.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def context(self) -> AbstractContextManager[Any]:
        """The context of the thread that copies."""
        return torch.get_device_module(self._device).device(self._device)  # type: ignore[no-any-return]

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Begin to copy `batch`; returns the call with which the main thread takes the copy."""
        with self._stream:
            copied = _mapped(batch, self._copy)
            done = self._stream.record_event()

        def take() -> Any:
            training = torch.accelerator.current_stream(self._device)
            training.wait_event(done)
            for each in _tensors(copied):
                # Its memory belongs to the other stream, which might use it again while a step still reads it.
                each.record_stream(training)
            return copied

        return take

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.device.type != "cpu":
            return tensor
        # A copy from memory that is not pinned lets the host wait for it.
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if type(value) is Tensor:
        return function(value)
    if type(value) is dict:
        return {key: _mapped(each, function) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, function) for each in value))
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, function) for each in value)
    return value


def _tensors(value: Any) -> Iterator[Tensor]:
    if type(value) is Tensor:
        yield value
    elif type(value) is dict:
        for each in value.values():
            yield from _tensors(each)
    elif type(value) in (list, tuple) or hasattr(value, "_fields"):
        for each in value:
            yield from _tensors(each)
