"""One way to read sharded and whole tensors."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local_of(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, the same memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_of(tensor: Tensor) -> Tensor:
    """The whole of a DTensor, on every rank; any other tensor itself. A collective for the former."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
