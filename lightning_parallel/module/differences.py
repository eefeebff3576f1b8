"""Comparison of two runs that should be equal up to the order of summation, in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_VALUES, _GRADIENTS, _COUNTS = 0.3, 6.0, 3.0
"""Tolerances in units of the square root of the dtype's precision. In fp32 that is 1e-4 for a loss, where two orders of
summation differ by about 1e-7 in one step, and 2e-3 for the gradient of a parameter, through many layers of it."""
_MOST_COUNTS = 0.3
"""The largest tolerance of counts: what counts twice, or half, is further off in any dtype."""
_LEAST = 1e-12
"""The least norm that is added up in fp32, in which squares of smaller numbers vanish."""


@dataclass(frozen=True)
class Tolerance:
    """The distance that two runs in one dtype may have.

    Args:
        precision: The distance from 1 to the next number in the coarsest dtype in which they compute.

    Example:
        >>> Tolerance(torch.finfo(torch.float32).eps).value
        0.0001...
    """

    precision: float

    @property
    def value(self) -> float:
        """Of a loss or a logged value, relative."""
        return _VALUES * math.sqrt(self.precision)

    @property
    def output(self) -> float:
        """Of what a module returns, as a share of its norm."""
        return math.sqrt(self.precision)

    @property
    def gradient(self) -> float:
        """Of a gradient, as a share of its norm."""
        return _GRADIENTS * math.sqrt(self.precision)

    @property
    def count(self) -> float:
        """Of numbers that are counted, relative: rounding may take a prediction from one class to another."""
        return min(_COUNTS * math.sqrt(self.precision), _MOST_COUNTS)

    @property
    def negligible(self) -> float:
        """The share of the norm of all gradients below which that of one parameter is noise of the others.

        So it is for the sums of a metric: one of them may be the difference of large numbers.
        """
        return math.sqrt(self.precision)


def value_difference(ours: object, expected: object) -> float:
    """The relative difference of two numbers, or of tensors of them; infinite where one is none or not a number.

    Args:
        ours: A number or tensor.
        expected: What it should be.
    """
    if ours is None or expected is None:
        return 0.0 if ours is expected else math.inf
    first, second = (torch.as_tensor(each).detach().double().cpu() for each in (ours, expected))
    return _distance(first, second, float(second.norm()))


def gradient_differences(
    ours: Callable[[str], Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance
) -> dict[str, float]:
    """The differences of gradients beyond the tolerance, as shares of their norms.

    Args:
        ours: Returns the gradient of the parameter of a name; called once for each, in the order of `expected`, so that
            no more than one is whole at a time where they are sharded.
        expected: Name -> gradient, as it should be.
        tolerance: How far they may be apart.

    Returns:
        Name -> difference, the largest first; empty where they are equal.
    """
    norms = {name: _norm(gradient) for name, gradient in expected.items()}
    total = math.hypot(*norms.values())
    found = {}
    for name, gradient in expected.items():
        own, norm = ours(name).to(gradient.device), norms[name]
        if not _distance(own, gradient, norm + tolerance.negligible * total) <= tolerance.gradient:
            found[name] = _distance(own, gradient, norm)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def state_differences(
    ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance
) -> dict[str, float]:
    """The differences beyond the tolerance of what one metric has added up and counted.

    Args:
        ours: Name of a state -> its value.
        expected: The same, as it should be.
        tolerance: How far they may be apart.

    Returns:
        Name -> relative difference, the largest first; empty where they are equal.
    """
    pairs = {name: (ours[name].double().cpu(), value.double().cpu()) for name, value in expected.items()}
    all_counts = sum(float(theirs.abs().sum()) for _, theirs in pairs.values() if _is_count(theirs))
    total = math.sqrt(sum(float(theirs[theirs.isfinite()].norm()) ** 2 for _, theirs in pairs.values()))
    found = {}
    for name, (own, theirs) in pairs.items():
        if own.shape == theirs.shape and _is_count(own) and _is_count(theirs):
            apart, scale = float((own - theirs).abs().sum()), float(theirs.abs().sum())
            found[name] = 0.0 if apart == 0.0 else _ratio(apart, scale + tolerance.negligible * all_counts)
            found[name] = found[name] if found[name] > tolerance.count else 0.0
        else:
            found[name] = _distance(own, theirs, float(theirs.norm()) + tolerance.negligible * total)
            found[name] = 0.0 if found[name] <= tolerance.value else found[name]
    return dict(sorted(((name, apart) for name, apart in found.items() if apart != 0.0), key=lambda item: -item[1]))


def first_of(names: Sequence[str], most: int = 4) -> str:
    """The first `most` of `names`, and the number of the others.

    Args:
        names: What to name.
        most: How many.
    """
    others = len(names) - most
    return ", ".join(names[:most]) + (f" and {others} more" if others > 0 else "")


def _distance(ours: Tensor, expected: Tensor, scale: float) -> float:
    if ours.shape != expected.shape:
        return math.inf
    apart = _norm(ours - expected)
    if not math.isfinite(apart) and not bool((finite := expected.isfinite()).all()):
        # An overflow, as fp16 has them before its scale is found: equal if it happens in both.
        return 0.0 if torch.equal(finite, ours.isfinite()) else math.inf
    return 0.0 if apart == 0.0 else _ratio(apart, scale)


def _norm(tensor: Tensor) -> float:
    """The norm, to one part in a hundred. Gradients may be as large as the module, so a copy in fp64 is avoided."""
    numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if numbers.is_floating_point() and numbers.dtype != torch.float64:
        norm = float(torch.linalg.vector_norm(numbers, dtype=torch.float32))
        if _LEAST < norm < 1.0 / _LEAST:
            return norm
    return float(numbers.double().norm())


def _ratio(apart: float, scale: float) -> float:
    return apart / scale if scale > 0.0 and math.isfinite(apart) else math.inf


def _is_count(value: Tensor) -> bool:
    return bool((value.isfinite() & (value == value.round())).all())
