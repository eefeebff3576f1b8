"""The modules of the zoo by name, and the packages that each needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.zoo.steps import Published, Training

Build = Callable[[], Training | Published]


@dataclass(frozen=True)
class Entry:
    """A module that is built from a configuration, with random weights.

    Args:
        build: Builds it; a package is imported then, and not before.
        packages: What has to be installed for it.
    """

    build: Build
    packages: tuple[str, ...]


ZOO: dict[str, Entry] = {}
"""Name -> module; the files of models beside this one fill it."""


def of(*packages: str) -> Callable[[Build], Build]:
    """Enter a module that needs these packages, under the name of the function that builds it."""

    def enter(build: Build) -> Build:
        assert build.__name__ not in ZOO
        ZOO[build.__name__] = Entry(build, packages)
        return build

    return enter
