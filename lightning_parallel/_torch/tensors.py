"""Tensors without storage and lists of operations: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def operations(*names: str) -> frozenset[Any]:
    """All overloads of those of the named operations that this version of torch has."""
    found = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    return frozenset(getattr(packet, overload) for packet in found for overload in packet.overloads())


MATRIX_PRODUCTS = operations("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm")
"""The operations of `torch.ops.aten` that linear maps end up in; there is no public list."""


ATTENTIONS = operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
    "_flex_attention",
)
"""The operations that scaled-dot-product attention ends up in."""


def tensor_without_storage(cls: type[Any], meta: Tensor, device: torch.device) -> Any:
    """Make a tensor of a subclass that has no memory.

    `Tensor._make_wrapper_subclass`, since 1.11; torch's own subclasses use it, there is no public spelling.

    Args:
        cls: The subclass.
        meta: Gives shape, strides and dtype.
        device: The device that the tensor reports.
    """
    offset = int(meta.storage_offset())
    make: Any = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
    return make(cls, meta.shape, strides=meta.stride(), storage_offset=offset, dtype=meta.dtype, device=device)


def follow_view(function: Any, args: Any, kwargs: Any) -> None:
    """Change shape and strides of a tensor without storage as an operation such as ``transpose_`` does in place.

    `torch.Tag.inplace_view`, since 1.12, marks such operations; torch's own subclasses use
    `torch._C._DisableTorchDispatch`, since 1.13. No public spelling.

    Args:
        function: An operation of `torch.ops.aten`; others than views in place do nothing.
        args: Its arguments.
        kwargs: Those by name.
    """
    if torch.Tag.inplace_view in function.tags:
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]
            function(*args, **kwargs)


def with_local(tensor: DTensor, local: Tensor) -> DTensor:
    """Make a DTensor like another, of other memory, which may be on the host while its mesh is of devices.

    `DTensor.from_local` (public) would copy `local` to the device. FSDP2 uses the constructor and `DTensor._spec` for
    the same, since 2.5.

    Args:
        tensor: Gives mesh, placements, shape and strides of the whole.
        local: This rank's part.
    """
    make: Any = DTensor
    made: DTensor = make(local, tensor._spec, requires_grad=False)
    return made


@contextlib.contextmanager
def data_checked(check: Callable[[Tensor, Any], None]) -> Iterator[None]:
    """Inside this context, `check` is called before ``tensor.data = values``, with both.

    torch takes over the memory of `values`, and where there is none, the next look at `tensor` crashes the process.
    `data` of `torch._C.TensorBase`, in all supported versions; there is no public setter.
    """
    if "data" in vars(Tensor):  # checked already, by an outer context
        yield
        return
    plain: Any = vars(torch._C.TensorBase)["data"]

    def set_data(self: Tensor, values: Any) -> None:
        check(self, values)
        plain.__set__(self, values)

    Tensor.data = property(plain.__get__, set_data)  # type: ignore[assignment]
    try:
        yield
    finally:
        del Tensor.data
