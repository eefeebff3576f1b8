"""Numbers of bytes, as people read and write them."""

from __future__ import annotations

import re

_GIVEN = re.compile(r"(\d+(?:\.\d+)?)\s*(|[kmgt]i?)b?", re.IGNORECASE)


def in_words(num_bytes: float) -> str:
    """Such as ``"1.5 MiB"``.

    Args:
        num_bytes: A number of bytes.
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"


def bytes_in(text: str) -> int | None:
    """The number that is written as ``"500MB"``, ``"5GiB"`` or ``"4096"``, 1 or more; ``None`` if it is none.

    Args:
        text: As given by the user; ``GB`` are powers of 1000, ``GiB`` of 1024.
    """
    if (match := _GIVEN.fullmatch(text.strip())) is None:
        return None
    number, unit = match.groups()
    base = 1024 if unit.lower().endswith("i") else 1000
    power = " kmgt".index(unit[0].lower()) if unit else 0
    return int(float(number) * base**power) or None
