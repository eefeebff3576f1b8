"""The one exception with which a set-up is refused. It imports no torch, so that anything may import it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ConfigurationError(ValueError):
    """A set-up that cannot run, with every reason at once.

    Each violation says what was given, what is required and what to change.

    Args:
        violations: One sentence or short paragraph for each reason, in the order in which to mend them.

    Example:
        >>> raise ConfigurationError(["shard=3 does not divide 4 ranks; possible: 1, 2, 4"])
    """

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.violations) == 1:
            return self.violations[0]
        numbered = (f"  {index}. {violation}" for index, violation in enumerate(self.violations, start=1))
        return "\n".join([f"this set-up has {len(self.violations)} problems:", *numbered])

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[tuple[str, ...]]]:
        # Pickle would call the class with `args`, which hold the text and not the violations.
        return type(self), (self.violations,)


def check(violations: Iterable[str]) -> None:
    """Raise a :class:`ConfigurationError` with all `violations`, or return if there are none."""
    found = [violation for violation in violations if violation]
    if found:
        raise ConfigurationError(found)
