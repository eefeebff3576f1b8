"""Plain tensors that are the memory of others: private or version-dependent names of torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
_COMPARED = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}) | frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
"""Those whose numbers torch compares on all devices; others are seen, bit by bit, as whole numbers of their size."""
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_dense(tensor: Tensor) -> bool:
    """Whether collectives can write into `tensor` as it is: each of its elements has a place of its own.

    A DTensor is taken as it is: its ranks have other parts.
    """
    return isinstance(tensor, DTensor) or (
        tensor.layout is torch.strided
        and tensor.dtype in _COMPARED
        and tensor.dtype is not torch.int16
        and not is_traceable_wrapper_subclass(tensor)
        and not shared_dims(tensor)
    )


def dense_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return plain tensors that share the memory of `tensors`: what is written into them is written into these.

    Elements at one place in memory, as `Tensor.expand` makes them, come once; sparse tensors as their indices and
    values; tensors of other classes, such as quantized weights, as what they are made of.

    `Tensor._indices` and `Tensor._values`, since 1.0, are there for sparse tensors that are not coalesced, too;
    `torch.utils._python_dispatch.is_traceable_wrapper_subclass`, since 2.1. No public spelling.

    Args:
        tensors: Outside of a graph, of any layout and class.
    """
    return [part for tensor in tensors for part in ([tensor] if is_dense(tensor) else _parts(tensor))]


def is_same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of any layout have the same shape and values."""
    if first.shape != second.shape or first.layout is not second.layout:
        return False
    if first.layout is torch.strided:
        return torch.equal(first, second)
    ours, theirs = _parts(first), _parts(second)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether what is written into one of two tensors may be seen in the other."""
    ours, theirs = ({part.untyped_storage().data_ptr() for part in dense_parts((each,))} for each in (first, second))
    return not ours.isdisjoint(theirs)


@torch.no_grad()
def write(tensor: Tensor, value: Tensor) -> None:
    """Copy `value`, which comes from a tensor of the same form, into one whose elements may share memory."""
    for dim in shared_dims(tensor):
        tensor, value = tensor.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    tensor.copy_(value)


def _parts(tensor: Tensor) -> list[Tensor]:
    if tensor.layout is torch.sparse_coo:
        return dense_parts((tensor._indices(), tensor._values()))
    if tensor.layout in _COMPRESSED:
        return dense_parts(getattr(tensor, name)() for name in _COMPRESSED[tensor.layout])
    if is_traceable_wrapper_subclass(tensor):
        return dense_parts(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    for dim in shared_dims(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return [tensor if tensor.dtype in _COMPARED else tensor.view(_OF_SIZE[tensor.itemsize])]


def travelling(tensor: Tensor) -> Tensor:
    """The memory of a strided tensor in a dtype that collectives of all backends take: Gloo has no numbers of 16 bits.

    A contiguous one has one dimension, since buckets of torch copy a lone one of other strides onto itself.
    """
    seen = tensor if tensor.dtype in _COMPARED else tensor.view(_OF_SIZE[tensor.itemsize])
    seen = seen.view(torch.float16) if seen.dtype is torch.int16 else seen
    return seen.view(-1) if seen.is_contiguous() else seen


def shared_dims(tensor: Tensor) -> list[int]:
    """Dimensions along which all elements of a tensor lie at one place; none of a sparse or nested one."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return []
    return [dim for dim, stride in enumerate(tensor.stride()) if not stride and tensor.shape[dim] > 1]
