"""Compute with floating-point buffers in another dtype."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_parallel import _torch

_WITH_STATISTICS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def apply_buffer_dtype(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Let submodules see their own floating-point buffers in `dtype` while their `forward` runs, in place.

    The buffers themselves keep their dtype and precision; what forward writes into the copies is written back. Running
    statistics of BatchNorm and the like are left out: torch has no kernel for weights and statistics of two dtypes.

    Args:
        module: The whole module.
        dtype: The dtype that `forward` sees; ``None`` for no change.
    """
    for submodule in module.modules() if dtype is not None else ():
        if _castable(submodule, dtype) and not isinstance(submodule, _WITH_STATISTICS):
            submodule.__class__ = _casting(cast(Any, type(submodule)), dtype)


@functools.cache
def _casting(cls: type[Any], dtype: torch.dtype) -> type[nn.Module]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _cast_buffers(self, dtype):
            return cls.forward(self, *args, **kwargs)

    return _torch.modules.subclass_like(cls, forward)


@contextlib.contextmanager
def _cast_buffers(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    own = _castable(module, dtype)
    seen = {name: buffer.to(dtype) for name, buffer in own.items()}
    # Writes in place raise the version; a buffer without any keeps its full precision.
    versions = {name: value._version for name, value in seen.items()}
    module._buffers.update(seen)
    try:
        yield
    finally:
        for name, buffer in own.items():
            current = module._buffers[name]
            if current is not None and (current is not seen[name] or current._version != versions[name]):
                buffer.copy_(current)
            module._buffers[name] = buffer


def _castable(module: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {
        name: buffer
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
    }
