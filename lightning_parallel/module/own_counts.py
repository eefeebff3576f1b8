"""Numbers that a layer keeps and counts with: in attributes, and in buffers that it writes in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import _torch
from lightning_parallel.module.placeholders import is_placeholder

_LARGEST = 1 << 12
"""Elements of a buffer that may be a counter."""


class OwnCounts:
    """The numbers of a layer, to see which of them it changes in a run.

    Statistics of batches are left out: whoever cuts batches says so of them.

    Args:
        layer: The layer.

    Example:
        >>> before = OwnCounts(layer)
        >>> layer(hidden)
        >>> before.changed()
        ['num_calls']
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._before = layer, _numbers(layer)

    def changed(self) -> list[str]:
        """Names, below the layer's path, of the numbers that are others by now; not of new ones."""
        now = _numbers(self._layer)
        return [name for name, value in self._before.items() if name in now and now[name] != value]


def _numbers(layer: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, child in layer.named_modules():
        if "running_mean" in child._buffers:  # of a norm
            continue
        start = f"{path}." if path else ""
        found |= {start + name: value for name, value in vars(child).items() if type(value) in (int, float)}
        buffers = child.named_buffers(recurse=False)
        found |= {start + name: _listed(buffer) for name, buffer in buffers if _may_count(buffer)}
    return found


def _may_count(buffer: Tensor) -> bool:
    if is_placeholder(buffer) or type(buffer) is not Tensor or buffer.is_meta:
        return False
    return sum(part.numel() for part in _torch.dense_parts.dense_parts((buffer.detach(),))) <= _LARGEST


def _listed(buffer: Tensor) -> list[Any]:
    """The numbers of a buffer, those of a sparse one with their indices."""
    if buffer.layout is torch.strided:
        return buffer.tolist()  # type: ignore[no-any-return]
    return [part.tolist() for part in _torch.dense_parts.dense_parts((buffer.detach(),))]
