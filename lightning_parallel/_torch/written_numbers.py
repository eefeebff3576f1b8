"""Numbers that user code writes into tensors of which ranks hold parts: private names of torch."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

_MARK = "_lightning_parallel_numbers"
_SOURCE = "_lightning_parallel_source"
_FADING = 0.5
"""The share of its earlier numbers that a tensor keeps when it is written into, so that sums do not grow."""


class Number(NamedTuple):
    """The sum of some numbers, and that of their sizes; on a device, nobody waits for them."""

    total: float | Tensor = 0.0
    size: float | Tensor = 0.0

    def plus(self, other: Number) -> Number:
        """Both together."""
        return Number(self.total + other.total, self.size + other.size)


class _Numbers:
    """The numbers with which a tensor was made that nobody else has: single ones, and those of whole tensors.

    Views of one tensor share them.
    """

    def __init__(self) -> None:
        self.single, self.of_tensors = Number(), Number()

    def add(self, other: _Numbers) -> None:
        self.single, self.of_tensors = self.single.plus(other.single), self.of_tensors.plus(other.of_tensors)

    def replace(self, other: _Numbers) -> None:
        own = [Number(each.total * _FADING, each.size * _FADING) for each in (self.single, self.of_tensors)]
        self.single, self.of_tensors = own[0].plus(other.single), own[1].plus(other.of_tensors)


def note_source(part: Tensor, whole: Tensor) -> None:
    """Remember that `part` was cut from `whole`, the plain tensor that user code has given."""
    vars(part)[_SOURCE] = whole


def share(given: Any, result: Any) -> None:
    """Let `result`, a view or the data of `given`, carry the numbers of it, if it has any."""
    if isinstance(given, DTensor) and isinstance(result, DTensor) and (own := vars(given).get(_MARK)) is not None:
        vars(result)[_MARK] = own


def follow(
    function: Any, args: Any, kwargs: Any, target: Any, result: Any, tell: Callable[[str, Number], None]
) -> None:
    """Call `tell` with the numbers that a call has written into a DTensor that was there before.

    Results of earlier calls carry the numbers they were made with, until they are written or assigned: what a rank
    computes for itself, and throws away, is nobody's business.

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
    if target is None and not args and name.endswith("_"):
        target = kwargs.get("tensor")  # as functions of `torch.nn.init` pass it on
    written = _dtensors(args[:1] if is_assigned else target)
    made = [] if written else _dtensors(result)
    if not (written or made):
        return
    leaves = tree_leaves((args, kwargs))
    found = _numbers_in(leaves, written)
    known: list[_Numbers] = [own for each in written if (own := vars(each).get(_MARK)) is not None]
    if made:
        _carry(made, found, [each for each in leaves if isinstance(each, DTensor)])
    elif len(known) == len(written) and not is_assigned:
        for own in {id(own): own for own in known}.values():
            own.replace(found)
    else:
        _forget(leaves if is_assigned else [])
        call = f"an assignment to .{function.__self__.__name__}" if is_assigned else f"{name}()"
        tell(call, found.single)
        if found.of_tensors != Number():
            tell(f"{call} with a tensor", found.of_tensors)


def _dtensors(values: Any) -> list[DTensor]:
    return [each for each in tree_leaves(values) if isinstance(each, DTensor)]


def _carry(made: Sequence[DTensor], found: _Numbers, given: Sequence[DTensor]) -> None:
    """Let what was made carry numbers: those of the tensor that it is a view of, or those that were found."""
    known = {_memory(each): each for each in given}
    for each in made:
        if (origin := known.get(_memory(each))) is None:
            vars(each)[_MARK] = found
        else:
            share(origin, each)


def _forget(leaves: Sequence[Any]) -> None:
    """Take the numbers off tensors that are assigned: they are no longer a rank's own."""
    for each in leaves:
        if isinstance(each, DTensor):
            vars(each).pop(_MARK, None)


def _memory(tensor: DTensor) -> int:
    """A number of the memory, which tensors without any have, too."""
    return tensor._local_tensor.untyped_storage()._cdata  # type: ignore[no-any-return]


def _numbers_in(leaves: Sequence[Any], written: Sequence[DTensor]) -> _Numbers:
    """The numbers among `leaves`, and those that other DTensors than `written` carry."""
    found, own = _Numbers(), {id(each) for each in written}
    for each in leaves:
        if isinstance(each, DTensor):
            if id(each) not in own and (carried := vars(each).get(_MARK)) is not None:
                found.add(carried)
            if (source := vars(each).get(_SOURCE)) is not None:
                found.of_tensors = found.of_tensors.plus(_of_tensor(source))
        elif isinstance(each, Tensor):
            if not each.is_meta and each.ndim:
                found.of_tensors = found.of_tensors.plus(_of_tensor(each))
            elif not each.is_meta:
                found.single = found.single.plus(_of_tensor(each))
        elif isinstance(each, numbers.Real):
            found.single = found.single.plus(Number(float(each), abs(float(each))))
    return found


def _of_tensor(tensor: Tensor) -> Number:
    """The numbers of a plain tensor, each row with another weight, without a copy of it."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    plain = plain.detach().float() if plain.is_floating_point() and plain.element_size() == 1 else plain.detach()
    rows = plain.sum(dim=tuple(range(1, plain.ndim)), dtype=torch.float64) if plain.ndim > 1 else plain.double()
    weights = torch.linspace(1, 2, len(rows), dtype=torch.float64, device=rows.device) if rows.ndim else 1.0
    total = (rows * weights).sum()
    is_float = plain.is_floating_point()
    size = 2 * torch.linalg.vector_norm(plain, 1, dtype=torch.float64) if is_float else total.abs()
    return Number(total.item(), size.item()) if total.device.type == "cpu" else Number(total, size)
