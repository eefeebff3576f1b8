"""Numbers that user code writes into tensors of which ranks hold parts: private names of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

_NUMBER = "_lightning_parallel_number"


class Number(NamedTuple):
    """The sum of all numbers that were given, and that of their sizes; on a device, nobody waits for them."""

    total: float | Tensor = 0.0
    size: float | Tensor = 0.0

    def plus(self, other: Number) -> Number:
        """Both together."""
        return Number(self.total + other.total, self.size + other.size)


def follow(
    function: Any, args: Any, kwargs: Any, target: Any, result: Any, tell: Callable[[str, Number], None]
) -> None:
    """Call `tell` with the numbers that a call has written into a DTensor that was there before.

    Results of earlier calls carry the numbers they were made with, until one of them is written or assigned: what a
    rank computes for itself, and throws away, is nobody's business. What is in a graph of autograd is no value yet.

    Args:
        function: The function of torch.
        args: What it was given.
        kwargs: The same, by name.
        target: What it writes into, or ``None``.
        result: What it has returned.
        tell: Called with the name of the function.
    """
    name = getattr(function, "__name__", "")
    is_assigned = name == "__set__"
    written = [each for each in tree_leaves(args[:1] if is_assigned else target) if isinstance(each, DTensor)]
    if any(each.grad_fn is not None for each in written):
        return
    if written or (isinstance(result, DTensor) and not result.requires_grad):
        number = _sum_of(leaves := tree_leaves((args, kwargs)))
        if not written:
            _carry(result, number, leaves)
        elif is_assigned:
            for each in leaves[1:]:
                vars(each).pop(_NUMBER, None) if isinstance(each, DTensor) else None
            tell(f"an assignment to .{function.__self__.__name__}", number)
        elif all(_NUMBER in vars(each) for each in written):
            for each in written:
                vars(each)[_NUMBER] = number
        else:
            tell(f"{name}()", number)


def _carry(result: Any, number: Number, leaves: list[Any]) -> None:
    """Let `result` carry `number`, unless it is a view of what is there."""
    if _memory(result) not in [_memory(each) for each in leaves if isinstance(each, DTensor)]:
        vars(result)[_NUMBER] = number


def _memory(tensor: DTensor) -> int:
    try:
        return tensor._local_tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a tensor that is made of others, and has no memory of its own
        return 0


def _sum_of(leaves: list[Any]) -> Number:
    number = Number()
    for each in leaves:
        if isinstance(each, DTensor):
            number = number.plus(vars(each).get(_NUMBER, Number()))
        elif isinstance(each, Tensor):
            if not each.is_meta:
                number = number.plus(_of_tensor(each))
        elif isinstance(each, bool | int | float):
            number = number.plus(Number(float(each), abs(float(each))))
    return number


def _of_tensor(tensor: Tensor) -> Number:
    """The numbers of a plain tensor, without a copy of it; those of 8 bits are no matter for sums."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    plain = plain.detach().float() if plain.is_floating_point() and plain.element_size() == 1 else plain.detach()
    total = plain.sum(dtype=torch.float64)
    size = torch.linalg.vector_norm(plain, 1, dtype=torch.float64) if plain.is_floating_point() else total.abs()
    return Number(total.item(), size.item()) if total.device.type == "cpu" else Number(total, size)
