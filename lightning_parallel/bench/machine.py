"""The machine and the versions with which something was measured."""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import accelerator

from lightning_parallel.ranks.memory import host_memory

_PACKAGES = ("lightning_parallel", "torch", "lightning", "torchmetrics")
_CPU_INFO = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Package -> version, and Python's."""
    return {**{name: metadata.version(name) for name in _PACKAGES}, "python": platform.python_version()}


def machine() -> dict[str, Any]:
    """The host and its accelerators; no name of the machine, and no path."""
    count = accelerator.device_count() if accelerator.is_available() else 0
    name_of = getattr(torch.get_device_module(), "get_device_name", None)  # Apple's has none
    names = [str(name_of(index)) if name_of is not None else "unnamed" for index in range(count)]
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "model": _model(),
        "cores": num_cores(),
        "memory_bytes": host_memory(),
        "accelerators": names,
    }


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def digests(arguments: Sequence[str]) -> dict[str, str]:
    """File -> SHA-256, of the config files that a recipe's arguments name."""
    following = [second for first, second in itertools.pairwise(arguments) if first in ("--config", "-c")]
    joined = [argument.partition("=")[2] for argument in arguments if argument.startswith(("--config=", "-c="))]
    files = [Path(name) for name in [*following, *joined]]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def _model() -> str:
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
