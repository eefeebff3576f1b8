"""Numbers of ranks that divide what they share. Arithmetic only, no torch."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int, *, at_most: int | None = None) -> list[int]:
    """The divisors of a number, in ascending order.

    Args:
        number: Greater than 0; others have none.
        at_most: The largest divisor to return, if given.
    """
    end = number if at_most is None else min(number, at_most)
    return [n for n in range(1, end + 1) if number % n == 0]


def degrees_for_heads(heads: int, kv_heads: int) -> list[int]:
    """The numbers of ranks that can share the heads of an attention, in ascending order.

    Where there are more ranks than heads of keys and values, several ranks have the same one of these.

    Args:
        heads: Heads of queries.
        kv_heads: Heads of keys and values.

    Example:
        >>> degrees_for_heads(8, 2)
        [1, 2, 4, 8]
    """
    return [n for n in divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]


def listed(numbers: Iterable[int]) -> str:
    """Numbers in words, as messages give them: ``"1, 2, 4"``."""
    return ", ".join(map(str, numbers))
