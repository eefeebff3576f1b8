"""How the documentation is built: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.errors import ConfigError

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
MATRIX = DOCS.parent / "tests" / "support_matrix.json"
GENERATED = DOCS / "_generated"

sys.path.insert(0, str(DOCS.parent))  # the API pages are those of this checkout, wherever it is installed

import lightning_parallel  # noqa: E402

project = "lightning_parallel"
author = "the authors of lightning_parallel"
copyright = author
release = version = lightning_parallel.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"lightning_parallel {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "code"
"""What a docstring writes in single backticks."""
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
"""An overridden method without a docstring does what its base class says, and that is Lightning's documentation."""


def load_matrix() -> dict[str, Any]:
    """The committed support matrix, which the tests compare with what they find.

    Raises:
        ConfigError: In words, if the file is missing or does not have a cell for each module and name.
    """
    if not MATRIX.is_file():
        raise ConfigError("tests/support_matrix.json is missing: the support matrix of the docs is made from it")
    matrix: dict[str, Any] = json.loads(MATRIX.read_text(encoding="utf-8"))
    for key in ("names", "modules", "cells"):
        if key not in matrix:
            raise ConfigError(f"tests/support_matrix.json has no {key!r}; it needs 'names', 'modules' and 'cells'")
    for module in matrix["modules"]:
        for name in matrix["names"]:
            cell = matrix["cells"].get(module, {}).get(name)
            if cell is None:
                raise ConfigError(f"tests/support_matrix.json has no cell for {module} under {name}")
            if cell != "runs" and not cell.startswith("refused: "):
                raise ConfigError(
                    f"tests/support_matrix.json says {cell!r} for {module} under {name}; "
                    "possible: 'runs', or 'refused: ' and the reason"
                )
    return matrix


def check_descriptions(matrix: dict[str, Any]) -> None:
    """Raise a `ConfigError` for modules that the page about the matrix does not describe."""
    page = (DOCS / "support_matrix.md").read_text(encoding="utf-8")
    if missing := [module for module in matrix["modules"] if f"`{module}`" not in page]:
        raise ConfigError(f"docs/support_matrix.md does not describe {', '.join(missing)}, which the matrix lists")


def check_public_names() -> None:
    """Raise a `ConfigError` for public names that the API page leaves out."""
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    if missing := [name for name in lightning_parallel.__all__ if f":: lightning_parallel.{name}\n" not in page]:
        raise ConfigError(f"docs/api.md leaves out {', '.join(missing)} of lightning_parallel.__all__")


def matrix_as_markdown(matrix: dict[str, Any]) -> str:
    """A table with a row for each module and a column for each name, and the reasons of refusals below it."""
    reasons: list[str] = []

    def show(cell: str) -> str:
        if cell == "runs":
            return cell
        reason = cell.removeprefix("refused: ")
        if reason not in reasons:
            reasons.append(reason)
        return f"refused ({reasons.index(reason) + 1})"

    columns = [f"`{name}`" for name in matrix["names"]]
    rows = [["module", *columns], ["---"] * (len(columns) + 1)]
    for module in matrix["modules"]:
        rows.append([f"`{module}`", *(show(matrix["cells"][module][name]) for name in matrix["names"])])
    lines = [f"| {' | '.join(row)} |" for row in rows]
    if reasons:
        lines += ["", "Refused, with a message in which these words stand:", ""]
        lines += [f"{number}. “{reason}”" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, ""])


def generate(app: Sphinx) -> None:
    """Write what the pages include."""
    matrix = load_matrix()
    check_descriptions(matrix)
    check_public_names()
    GENERATED.mkdir(exist_ok=True)
    target = GENERATED / "support_matrix.md"
    text = matrix_as_markdown(matrix)
    if not target.is_file() or target.read_text(encoding="utf-8") != text:  # an unchanged file is not built again
        target.write_text(text, encoding="utf-8")


def keep_property_text(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give a property its text back: napoleon takes what stands before a colon there for a type."""
    if what == "property" and obj.__doc__:
        lines[:] = [*inspect.cleandoc(obj.__doc__).splitlines(), ""]


def setup(app: Sphinx) -> None:
    """Sphinx's entry point."""
    app.connect("builder-inited", generate)
    app.connect("autodoc-process-docstring", keep_property_text, priority=600)  # after napoleon's 500
