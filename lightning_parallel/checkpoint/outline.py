"""The state dict of a rank that writes no checkpoint, for hooks that change what is saved."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_parallel.module.placeholders import is_placeholder


def outline_of(own: dict[str, Any]) -> dict[str, Any]:
    """Give a rank that writes no checkpoint all names of a whole ``state_dict()``. No collective; nothing is copied.

    Hooks such as ``on_save_checkpoint`` run on all ranks: they take entries out, rename, scale or read them there.

    Args:
        own: The ``state_dict()`` of this rank, with its parts.

    Returns:
        Each tensor of which this rank has all, in host memory, as it is there; in place of others, zeros of that shape.
    """
    outline: dict[str, Any] = copy.copy(own)  # with the versions of modules
    for name, value in own.items():
        if isinstance(value, Tensor) and (_is_part(value) or value.device.type != "cpu"):
            outline[name] = _zeros(value)
    return outline


def _is_part(value: Tensor) -> bool:
    return isinstance(value, DTensor) or is_placeholder(value)


def _zeros(like: Tensor) -> Tensor:
    """Zeros that take no memory until something is written into them: NumPy asks the system for zeroed pages."""
    zeros = torch.from_numpy(np.zeros(math.prod(like.shape) * like.dtype.itemsize, dtype=np.uint8))
    return zeros.view(like.dtype).view(like.shape)
