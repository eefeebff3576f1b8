"""The accelerators of this machine, and a check that those asked for are among them."""

from __future__ import annotations

import subprocess
from typing import Any

import torch


def visible_devices() -> list[str]:
    """One line for each accelerator: number, name, memory; and the MIG instances that the driver reports."""
    lines = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(f"cuda:{index}  {properties.name}  {properties.total_memory / 2**30:.1f} GiB")
    if torch.backends.mps.is_available():
        lines.append("mps:0  Apple GPU")
    return [*lines, *_mig_instances()]


def device_violations(accelerator: Any, devices: Any) -> list[str]:
    """Reasons why `Trainer(accelerator=..., devices=...)` asks for devices that are not there; empty if they are.

    Args:
        accelerator: As given to the Trainer, by name.
        devices: As given to the Trainer: a number, a list of indices, or either as a string.
    """
    try:
        wanted, number = _indices(devices), _number(devices)
    except ValueError:
        return [f"devices={devices!r} is neither a number of devices nor a list of their indices; {_listing()}"]
    on_cuda = accelerator in ("cuda", "gpu") or (accelerator in ("auto", None) and torch.cuda.is_available())
    if accelerator in ("cuda", "gpu") and not torch.cuda.is_available():
        return [f"accelerator={accelerator!r}, but this machine has no CUDA device; {_listing()}"]
    # Of accelerators of other kinds, which have the same -1, nothing more is known here.
    has_all = on_cuda or not (accelerator == "cpu" or (accelerator in ("auto", None) and not visible_devices()))
    if number is not None and (number < -1 or number == 0 or (number == -1 and not has_all)):
        all_of_them = ", or -1 for all" if has_all else ""
        return [f"devices={devices!r} is no number of devices; give 1 or more{all_of_them}; {_listing()}"]
    if not on_cuda:
        if wanted is not None:
            return [
                f"devices={devices!r} names devices by index, but the host is one device; give a number; {_listing()}"
            ]
        return []
    count = torch.cuda.device_count()
    missing = [index for index in wanted or () if not 0 <= index < count]
    if missing:
        return [f"devices={devices!r}: there is no device {', '.join(map(str, missing))}; {_listing()}"]
    if number is not None and number > count:
        return [f"devices={devices!r}, but there are {count}; {_listing()}"]
    return []


def _indices(devices: Any) -> list[int] | None:
    if isinstance(devices, str) and "," in devices:
        devices = [part for part in devices.split(",") if part.strip()]
    if not isinstance(devices, list | tuple):
        return None
    return [int(device) for device in devices]


def _number(devices: Any) -> int | None:
    """The number of devices; ``None`` where they are listed, or left to Lightning."""
    if devices in (None, "auto") or isinstance(devices, list | tuple) or (isinstance(devices, str) and "," in devices):
        return None
    return int(devices)


def _listing() -> str:
    lines = visible_devices()
    return "devices that are there: " + ("; ".join(lines) if lines else "the host (accelerator 'cpu') only")


def _mig_instances() -> list[str]:
    """Lines of `nvidia-smi -L` about multi-instance GPUs; none where the tool is missing."""
    if not torch.cuda.is_available():
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in listing.splitlines() if line.lstrip().startswith("MIG")]
