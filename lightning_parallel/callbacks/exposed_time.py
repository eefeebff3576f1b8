"""Communication of an update that no computing hides, by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]

_COMMUNICATION = ("gloo:", "nccl:", "ncclDevKernel", "ncclKernel", "mpi:", "ucc:")
"""Beginnings of the names of collectives: on the host, and as kernels."""
_COMPUTING = "aten::"
_MICRO = 1e-6


class UpdateProfile:
    """Profiles one update, from `start` to `stop`.

    Args:
        device: The device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_device = device.type in ("cuda", "xpu")
        activities = {"cuda": [ProfilerActivity.CUDA], "xpu": [ProfilerActivity.XPU]}.get(device.type, [])
        self._profile = profile(activities=[ProfilerActivity.CPU, *activities])

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of a trainer profiles by itself."""

    def start(self) -> None:
        """Begin."""
        self._profile.start()

    def stop(self) -> float:
        """End; returns the seconds of communication that nothing hides. On an accelerator it waits for the device."""
        self._profile.stop()
        return exposed_seconds(self._profile.events() or (), on_device=self._is_device)


def exposed_seconds(events: Iterable[Any], *, on_device: bool) -> float:
    """Seconds in which collectives run and nothing computes.

    Args:
        events: Those of torch's profiler, with name, type of device, and time range in microseconds.
        on_device: Whether the kernels of a device count, and not what the host does.
    """
    found = [each for each in events if (_kind(each) != "CPU") == on_device]
    collectives = [_span(each) for each in found if each.name.startswith(_COMMUNICATION)]
    computing = [
        _span(each)
        for each in found
        if not each.name.startswith(_COMMUNICATION) and (on_device or each.name.startswith(_COMPUTING))
    ]
    return _MICRO * sum(end - start for start, end in without(merged(collectives), merged(computing)))


def _kind(event: Any) -> str:
    return str(getattr(event.device_type, "name", event.device_type))


def _span(event: Any) -> Span:
    return float(event.time_range.start), float(event.time_range.end)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same time as spans that do not overlap, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """The time of `spans` that is in none of `others`; both as `merged` gives them."""
    found: list[Span] = []
    index = 0
    for start, end in spans:
        while index < len(others) and others[index][1] <= start:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            found.append((start, end))
    return found
