"""Keep sharded parameters, gradients and optimizer state in host memory. Layer 2."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

OFFLOADS = ("none", "all")


def offload_violations(offload: str) -> list[str]:
    """Why `offload` is not a choice; empty if it is."""
    return [] if offload in OFFLOADS else [f"offload={offload!r} is unknown; possible: {', '.join(OFFLOADS)}"]


def build_offload_policy(offload: str, device: torch.device) -> OffloadPolicy:
    """What FSDP2 takes for `offload`. Where the device is the host there is nothing to offload.

    Host memory is pinned, so that copies overlap with computation, where there is an accelerator to pin it for:
    `CPUOffloadPolicy()` without one raises.
    """
    if offload == "none" or device.type == "cpu":
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=True)
