"""The search for the largest size that fits: each trial is expected to fit by those before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

_REFINEMENTS = 4
"""Trials that are no doubling: where memory is not quite affine in the size, each is closer than the one before."""


def largest_fitting(
    trial: Callable[[int], float], *, start: int, maximum: int, budget: float, unit: int = 1
) -> tuple[int, dict[int, float]]:
    """The largest size whose peak is within `budget`, and the peaks of all trials; 0 if no size is.

    Peaks are taken to grow with the size, about as a line does.

    Args:
        trial: Size -> its peak in bytes, infinite if there is none.
        start: The first size to try.
        maximum: The largest.
        budget: Bytes that a peak may have.
        unit: Of which sizes are multiples; the least of them is tried even if it is above `maximum`.

    Example:
        >>> largest_fitting(lambda size: 100 + 7 * size, start=2, maximum=8192, budget=1000)[0]
        128
    """
    if unit > 1:
        most = max(1, maximum // unit)
        least = min(-(-start // unit), most)
        count, found = largest_fitting(lambda units: trial(units * unit), start=least, maximum=most, budget=budget)
        return count * unit, {units * unit: peak for units, peak in found.items()}
    size, peaks = start, {start: trial(start)}
    while peaks[size] > budget and size > 1:
        size //= 2
        peaks[size] = trial(size)
    if peaks[size] > budget:
        return 0, peaks
    refinements = 0
    while refinements < _REFINEMENTS:
        low = max(size for size, peak in peaks.items() if peak <= budget)
        size = min(_predicted(peaks, low, budget), maximum)
        if size in peaks or low == maximum:
            break
        refinements += low < size < 2 * low
        peaks[size] = trial(size)
    return max(size for size, peak in peaks.items() if peak <= budget), peaks


def _predicted(peaks: Mapping[int, float], low: int, budget: float) -> int:
    """The next size that fits by the line through the two peaks around `low`, at most its double."""
    if len(peaks) == 1:  # no line yet: memory at most doubles, and if that is too much a smaller size is safe
        return 2 * low if 2 * peaks[low] <= budget else max(1, low // 2)
    above = min((size for size in peaks if size > low), default=None)
    other = above if above is not None else max(size for size in peaks if size < low)
    slope = (peaks[other] - peaks[low]) / (other - low)
    largest = 2 * low if above is None else above - 1
    if slope <= 0:
        return largest
    return min(low + int((budget - peaks[low]) / slope), largest)
