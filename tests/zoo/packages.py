"""The public packages of the zoo: which versions its table was made with, and whether they are here."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@cache
def pinned() -> dict[str, str]:
    """The packages of the extras `zoo` and `published`, and their versions."""
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    return dict(requirement.split("==") for requirement in [*extras["zoo"], *extras["published"]])


@cache
def installed(package: str) -> str:
    """The version of a package that is installed, or nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def lacking(packages: tuple[str, ...]) -> str:
    """In words, which of these packages the table does not speak of: those that are missing, or of another version."""
    others = [f"{name}=={pinned()[name]} (here: {installed(name) or 'none'})" for name in packages]
    return ", ".join(other for name, other in zip(packages, others, strict=True) if installed(name) != pinned()[name])
