"""How the documentation is built: ``sphinx-build -W --keep-going -b html docs docs/_build/html``."""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sphinx.errors import ConfigError

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).resolve().parent
GENERATED = DOCS / "_generated"

sys.path.insert(0, str(DOCS.parent))  # the API pages are those of this checkout, wherever it is installed

import lightning_parallel  # noqa: E402
import lightning_parallel.callbacks  # noqa: E402
from lightning_parallel.bench.summary import Summary  # noqa: E402
from lightning_parallel.bench.table import as_markdown  # noqa: E402

project = "lightning_parallel"
author = "the authors of lightning_parallel"
copyright = author
release = version = lightning_parallel.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
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


@dataclass(frozen=True)
class Matrix:
    """A committed table of what runs under which name, which the tests compare with what they find.

    Args:
        name: Of the file, `tests/<folder>/<name>.json`, and of what is generated from it, `_generated/<name>.md`.
        row: What one row is.
        rows: The key of the rows.
        page: The page that describes each row.
        folder: Where the tests have the file.
        words: What a cell may say beside "runs".
        defects: What it may say, though it should not.
    """

    name: str
    row: str
    rows: str
    page: str
    folder: str = "matrices"
    words: tuple[str, ...] = ("refused",)
    defects: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        """Where the file is, from the root of the repository."""
        return f"tests/{self.folder}/{self.name}.json"


MATRICES = (
    Matrix("support_matrix", row="module", rows="modules", page="support_matrix.md"),
    Matrix("product_matrix", row="module", rows="modules", page="support_matrix.md"),
    Matrix("policy_matrix", row="policy", rows="policies", page="policies.md"),
    Matrix(
        "zoo", row="module", rows="modules", page="public_modules.md", folder="zoo", words=("refused", "told"),
        defects=("wrong", "hangs", "crashes", "differs"),
    ),
)  # fmt: skip


def load_matrix(matrix: Matrix) -> dict[str, Any]:
    """The contents of a committed matrix.

    Raises:
        ConfigError: In words, if the file is missing or does not have a cell for each row and name.
    """
    file = matrix.file
    if not (DOCS.parent / file).is_file():
        raise ConfigError(f"{file} is missing: a table of the docs is made from it")
    table: dict[str, Any] = json.loads((DOCS.parent / file).read_text(encoding="utf-8"))
    for key in ("names", matrix.rows, "cells"):
        if key not in table:
            raise ConfigError(f"{file} has no {key!r}; it needs 'names', {matrix.rows!r} and 'cells'")
    for row in table[matrix.rows]:
        for name in table["names"]:
            cell = table["cells"].get(row, {}).get(name)
            if cell is None:
                raise ConfigError(f"{file} has no cell for {row} under {name}")
            if cell != "runs" and cell.partition(": ")[0] not in (*matrix.words, *matrix.defects):
                raise ConfigError(
                    f"{file} says {cell!r} for {row} under {name}; possible: 'runs', or 'refused: ' and the reason"
                )
    return table


def label(row: str) -> str:
    """How a row is written: code as code, words as words."""
    return row if " " in row else f"`{row}`"


def check_descriptions(matrix: Matrix, table: dict[str, Any]) -> None:
    """Raise a `ConfigError` for rows that the page about the matrix does not describe."""
    page = (DOCS / matrix.page).read_text(encoding="utf-8")
    if missing := [row for row in table[matrix.rows] if label(row) not in page]:
        raise ConfigError(f"docs/{matrix.page} does not describe {', '.join(missing)}, which {matrix.file} lists")


def check_public_names() -> None:
    """Raise a `ConfigError` for public names that the API page leaves out."""
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for package in (lightning_parallel, lightning_parallel.callbacks):
        if missing := [name for name in package.__all__ if f":: {package.__name__}.{name}\n" not in page]:
            raise ConfigError(f"docs/api.md leaves out {', '.join(missing)} of {package.__name__}.__all__")


def matrix_as_markdown(matrix: Matrix, table: dict[str, Any]) -> str:
    """A row for each row and a column for each name, and the reasons of refusals below it."""
    reasons: list[str] = []

    def show(cell: str, name: str) -> str:
        if cell == "runs":
            return cell
        word, _, reason = cell.partition(": ")
        # A message that names the strategy is one reason under all of them.
        reason = reason.removeprefix(f"{name} ")
        if reason not in reasons:
            reasons.append(reason)
        number = f"{word} ({reasons.index(reason) + 1})"
        return f"**{number}**" if word in matrix.defects else number

    # On few letters' room a name goes on in the next line.
    columns = [re.sub("([_:,])", r"\1<wbr>", f"<code>{name}</code>") for name in table["names"]]
    rows = [[matrix.row, *columns], ["---"] * (len(columns) + 1)]
    for row in table[matrix.rows]:
        rows.append([label(row), *(show(table["cells"][row][name], name) for name in table["names"])])
    lines = ["::::{container} matrix", *(f"| {' | '.join(row)} |" for row in rows), "::::"]
    if reasons:
        said = {cell.partition(": ")[0] for row in table["cells"].values() for cell in row.values()}
        defects = " or a defect" if said & set(matrix.defects) else ""
        told = ", or told where numbers are others by definition" if "told" in said else ""
        lines += ["", f"Refused{told}{defects}, with a message that contains these words:", ""]
        lines += [f"{number}. “{reason}”" for number, reason in enumerate(reasons, start=1)]
    if same := table.get("same_on_the_cpu"):
        lines += ["", "Without an accelerator, these prove nothing of what they are for:", ""]
        lines += [f"- {label(name)}: {text}." for name, text in same.items()]
    return "\n".join([*lines, ""])


def bench_as_markdown() -> str:
    """The tables of the committed bench, as the command shows them."""
    found = json.loads((DOCS / "benchmarks" / "bench.json").read_text(encoding="utf-8"))
    return as_markdown([Summary.of_plain(cell) for cell in found["cells"]])


def generate(app: Sphinx) -> None:
    """Write what the pages include."""
    check_public_names()
    GENERATED.mkdir(exist_ok=True)
    texts = {"bench": bench_as_markdown()}
    for matrix in MATRICES:
        table = load_matrix(matrix)
        check_descriptions(matrix, table)
        texts[matrix.name] = matrix_as_markdown(matrix, table)
    for name, text in texts.items():
        target = GENERATED / f"{name}.md"
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
