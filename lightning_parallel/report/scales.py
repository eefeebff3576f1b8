"""Axes of charts: round numbers on them, and as many points as can be told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

Point = tuple[float, float]


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Round numbers from `low` to `high`: multiples of 1, 2, 2.5 or 5 times a power of ten.

    Args:
        low: The least value.
        high: The greatest one; more than `low`.
        number: About how many.

    Example:
        >>> ticks(0, 1)
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """
    rough = (high - low) / max(1, number - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [place * step for place in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def bounds(values: Sequence[float], *, from_zero: bool = False) -> Point:
    """The least and the greatest of finite `values`, which are apart; 0 and 1 without any.

    Args:
        values: The values.
        from_zero: Whether 0 is among them.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return 0.0, 1.0
    low, high = min([*known, 0.0] if from_zero else known), max(known)
    if high > low:
        return low, high
    apart = abs(low) / 2 or 1.0
    return (low, high + apart) if from_zero else (low - apart, high + apart)


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, among them the least and the greatest value of each stretch, so that no spike is lost.

    Args:
        points: Steps with values, in order.
        most: A number, 4 or more.
    """
    if len(points) <= most:
        return list(points)
    kept = []
    size = len(points) / (most // 2)
    for place in range(most // 2):
        stretch = points[int(place * size) : int((place + 1) * size)]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def in_words(value: float) -> str:
    """A number in few characters, such as ``"12.5k"``; text for those that are none."""
    size = abs(value)
    for limit, word in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if math.isfinite(size) and size >= limit:
            return f"{value / (1e3 if word == 'k' else limit):.4g}{word}"
    return f"{value:.4g}"
