"""Run code of the user's for what it tells, and leave no trace of it. Layer 2."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """What runs in here leaves no trace on `module`: attributes, lists, buffers, states of metrics."""
    before = []
    tensors = {}
    for submodule in module.modules():
        values = {k: v for k, v in vars(submodule).items() if k not in ("_parameters", "_modules")}
        shallow = {k: (v, copy.copy(v)) for k, v in values.items() if type(v) in (list, dict, set)}
        before.append((submodule, values, shallow))
        for value in (*values.values(), *submodule._buffers.values()):
            if isinstance(value, Tensor) and not value.is_meta and not isinstance(value, DTensor):
                tensors[value] = value.detach().clone()
    try:
        yield
    finally:
        for submodule, values, shallow in before:
            for name in set(vars(submodule)) - set(values) - {"_parameters", "_modules"}:
                del submodule.__dict__[name]
            submodule.__dict__.update(values)
            for container, content in shallow.values():
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)
        with torch.no_grad():
            for tensor, value in tensors.items():
                tensor.copy_(value)
