"""Comparison of two runs that should be equal up to the order of summation, in words and numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_VALUES, _GRADIENTS = 0.3, 6.0
"""Tolerances in units of the square root of the dtype's precision. In fp32 that is 1e-4 for a loss, where two orders of
summation differ by about 1e-7 in one step, and 2e-3 for the gradient of a parameter, through many layers of it."""


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
    def gradient(self) -> float:
        """Of a gradient, as a share of its norm."""
        return _GRADIENTS * math.sqrt(self.precision)

    @property
    def negligible(self) -> float:
        """The share of the norm of all gradients below which that of one parameter is noise of the others."""
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
    ours: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: Tolerance
) -> dict[str, float]:
    """The differences of gradients beyond the tolerance, as shares of their norms.

    Args:
        ours: Name of a parameter -> its gradient.
        expected: The same, as it should be.
        tolerance: How far they may be apart.

    Returns:
        Name -> difference, the largest first; empty where they are equal.
    """
    total = math.sqrt(sum(float(gradient.double().norm()) ** 2 for gradient in expected.values()))
    found = {}
    for name, gradient in expected.items():
        reference = gradient.double().cpu()
        norm = float(reference.norm())
        floor = norm + tolerance.negligible * total
        apart = _distance(ours[name].double().cpu(), reference, floor)
        if not apart <= tolerance.gradient:
            found[name] = _distance(ours[name].double().cpu(), reference, norm)
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
    finite = expected.isfinite()
    if not bool(finite.all()):
        # An overflow, as fp16 has them before its scale is found: equal if it happens in both.
        return 0.0 if torch.equal(finite, ours.isfinite()) else math.inf
    apart = float((ours - expected).norm())
    if apart == 0.0:
        return 0.0
    return apart / scale if scale > 0.0 and math.isfinite(apart) else math.inf
