"""The state dict of a rank that writes no checkpoint, for hooks that change what is saved."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.module.placeholders import is_placeholder


def outline_of(module: nn.Module) -> dict[str, Any]:
    """Take the names that a whole ``state_dict()`` has. No collective, and nothing is copied.

    Hooks such as ``on_save_checkpoint`` run on all ranks, and take entries out, rename or scale them there.

    Args:
        module: The module, sharded or not.

    Returns:
        Each tensor of which this rank has all, in host memory, as it is there; of others the shape and the dtype, as
        tensors on the device ``meta``.
    """
    own = module.state_dict()
    outline: dict[str, Any] = copy.copy(own)  # with the versions of modules
    for name, value in own.items():
        if isinstance(value, Tensor) and (_is_part(value) or value.device.type != "cpu"):
            outline[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return outline


def _is_part(value: Tensor) -> bool:
    return isinstance(value, DTensor) or is_placeholder(value)
