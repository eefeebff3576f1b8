"""Numbers of ranks that divide what they share. Arithmetic only, no torch."""

from __future__ import annotations

from collections.abc import Iterable


def divisors(number: int, *, at_most: int | None = None) -> list[int]:
    """The divisors of `number` in ascending order, those up to `at_most` if it is given."""
    end = number if at_most is None else min(number, at_most)
    return [n for n in range(1, end + 1) if number % n == 0]


def degrees_for_heads(heads: int, kv_heads: int) -> list[int]:
    """How many ranks can share the heads of an attention: where they outnumber those of keys, these are repeated.

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
