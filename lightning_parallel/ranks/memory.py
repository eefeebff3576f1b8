"""Memory of a device and of the host, in bytes: total, free, and the peak of this process.

The host's memory is bounded by the limits of this process's control groups (containers, batch systems), which may be
far less than what the machine has.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import accelerator

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def host_memory() -> int:
    """Bytes of host memory within the limit of the container, for all processes together.

    Example:
        >>> host_memory() // num_processes_on_this_machine
    """
    total = os.sysconf("SC_PHYS_PAGES") * _PAGE
    return min([total, *(limit for limit, _ in _cgroup_limits())])


def free_memory(device: torch.device) -> int:
    """Bytes that this process could still allocate on `device`, if nobody else does meanwhile.

    On an accelerator that is the driver's free memory and what torch's allocator holds unused. On the host (and on
    devices that share its memory) it is what the kernel calls available, within the limit of the container; the needs
    of other processes of this machine are not subtracted.

    Args:
        device: The device of this process.

    Example:
        >>> free_memory(torch.device("cpu"))
    """
    if has_own_memory(device):
        free, _ = accelerator.get_memory_info(device)
        return free + accelerator.memory_reserved(device) - accelerator.memory_allocated(device)
    return max(0, min([_available(), *(limit - used for limit, used in _cgroup_limits())]))


def usable_memory(device: torch.device, *, num_processes: int) -> int:
    """Bytes that this process may allocate in total on `device`; an equal share, where that is the host.

    Args:
        device: The device of this process.
        num_processes: Number of processes that share this machine.
    """
    if not has_own_memory(device):
        return host_memory() // max(1, num_processes)
    _, total = accelerator.get_memory_info(device)
    fraction = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)  # CUDA's and XPU's
    left = free_memory(device) + accelerator.memory_allocated(device)  # other processes and libraries have the rest
    return min(int(total * fraction(device)) if fraction is not None else total, left)


def reset_peak_memory(device: torch.device) -> bool:
    """Let `peak_memory` count from now on. Only accelerators and Linux can.

    Elsewhere, and where a sandbox forbids it, the host's peak is that of the whole life of the process.

    Args:
        device: The device of this process.

    Returns:
        Whether the peak counts from now on.
    """
    if has_own_memory(device):
        if accelerator.memory_stats(device):  # torch 2.11 and 2.13 raise if nothing was allocated yet
            accelerator.reset_peak_memory_stats(device)
        return True
    with contextlib.suppress(OSError):
        (_PROC / "self" / "clear_refs").write_text("5")  # proc(5): resets the high-water mark of the resident set
        return True
    return False


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process had at once on `device` since `reset_peak_memory`.

    On an accelerator that is what torch allocated. On the host it is the resident set, which includes the program and
    memory that the allocator did not give back.

    Args:
        device: The device of this process.
    """
    if has_own_memory(device):
        return accelerator.max_memory_allocated(device)
    mark = _kernel_table(_PROC / "self" / "status").get("VmHWM")
    if mark is not None:
        return mark
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes, but bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def headroom(device: torch.device) -> int:
    """Bytes of `device` that were still free at the peak of this process since `reset_peak_memory`.

    Args:
        device: The device of this process.
    """
    if has_own_memory(device):
        held = accelerator.memory_allocated(device)
    else:
        held = _kernel_table(_PROC / "self" / "status").get("VmRSS", peak_memory(device))
    return max(0, free_memory(device) - max(0, peak_memory(device) - held))


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a process on its device, in bytes; not a number where the device does not say it.

    Args:
        peak: As `peak_memory` has it.
        reserved: The most that torch's allocator held at once.
        retries: How often it had to give back what it held, and wait for the device, before it could go on.
    """

    peak: float
    reserved: float = math.nan
    retries: float = math.nan

    @classmethod
    def of(cls, device: torch.device) -> MemoryUse:
        """That of this process on `device`, so far."""
        if not has_own_memory(device) or not (stats := accelerator.memory_stats(device)):
            return cls(float(peak_memory(device)))
        reserved, retries = (stats.get(key, math.nan) for key in ("reserved_bytes.all.peak", "num_alloc_retries"))
        return cls(float(peak_memory(device)), float(reserved), float(retries))

    @classmethod
    def most(cls, uses: Sequence[MemoryUse]) -> MemoryUse:
        """The most that any of several processes had, and the retries of all."""
        peak, reserved = max(use.peak for use in uses), max(use.reserved for use in uses)
        return cls(peak, reserved, sum(use.retries for use in uses))

    @property
    def numbers(self) -> tuple[float, float, float]:
        """Peak, reserved and retries."""
        return self.peak, self.reserved, self.retries


def release_cached(device: torch.device) -> None:
    """Give memory that torch keeps for itself back to `device`: the first collectives of a step take some, too.

    Args:
        device: The device of this process; the host has nothing to give back, nor have some kinds of devices.
    """
    if has_own_memory(device) and (release := getattr(torch.get_device_module(device), "empty_cache", None)):
        release()


def has_own_memory(device: torch.device) -> bool:
    """Whether `device` has memory that is not the host's."""
    return device.type not in ("cpu", "mps")  # Apple's devices share the host's


def _available() -> int:
    available = _kernel_table(_PROC / "meminfo").get("MemAvailable")
    if available is not None:
        return available
    pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf(pages) * _PAGE


def _kernel_table(path: Path) -> dict[str, int]:
    """Lines such as ``VmHWM:  1234 kB``, in bytes; empty where there is no such file."""
    table = {}
    for line in (_read(path) or "").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            table[key] = int(words[0]) * 1024
    return table


def _cgroup_limits() -> Iterator[tuple[int, int]]:
    """(limit, use) of each control group around this process that has a limit, in bytes."""
    for folder, names in _cgroup_folders():
        limit, used = (_read(folder / name) for name in names)
        if limit is None or not limit.isdigit():
            continue  # no such group, or "max"
        yield int(limit), max(0, int(used or 0) - _reclaimable(folder))


def _cgroup_folders() -> Iterator[tuple[Path, tuple[str, str]]]:
    """Every folder of control groups that may have a limit, with the names of its files.

    A container sees its own group as the root. Outside of one, a process is in a group somewhere below the root, and
    the limit of every group on the way applies.
    """
    of_version_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    own: dict[str, str] = {}
    for line in (_read(_PROC / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        own[controllers] = path
    memory = next((path for names, path in own.items() if "memory" in names.split(",")), "/")
    for folder in _upwards(_CGROUP, own.get("", "/")):
        yield folder, ("memory.max", "memory.current")
    for folder in _upwards(_CGROUP / "memory", memory):
        yield folder, of_version_1


def _upwards(root: Path, path: str) -> Iterator[Path]:
    inner = root / path.lstrip("/")
    yield from (folder for folder in (inner, *inner.parents) if folder == root or root in folder.parents)


def _reclaimable(folder: Path) -> int:
    """Bytes of the inactive page cache: they count as a group's use, but the kernel frees them when it needs memory."""
    for line in (_read(folder / "memory.stat") or "").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
