"""The shape of the package: import levels and their picture, sizes, and the tree in the documentation."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_parallel"
MOST_LEVELS = 13
MOST_ROOT_FILES = 10
MOST_LINES = {"file": 350, "class": 200, "function": 50}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script that draws the picture; it also reads the imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("import_levels")


def test_modules_import_in_no_circle(script: Any) -> None:
    assert len(script.levels(script.module_graph())) == len(list(PACKAGE.rglob("*.py")))


def test_imports_are_found(script: Any) -> None:
    """A script that finds nothing would draw a tidy picture."""
    graph = script.module_graph()
    name = "lightning_parallel.parallelize"
    assert "lightning_parallel.module.snapshot" in graph[name]
    assert any(other.startswith("lightning_parallel.techniques.sharding") for other in graph[name])
    assert script.rooms_with_lightning() >= {"strategies", "callbacks", "cli"}
    assert "module" not in script.rooms_with_lightning()


def test_a_circle_is_found(script: Any) -> None:
    with pytest.raises(ValueError, match="cycle"):
        script.levels({"a": {"b"}, "b": {"c"}, "c": {"a"}})


def test_arrows_that_follow_from_longer_paths_are_left_out(script: Any) -> None:
    assert script.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_rooms_are_on_few_levels(script: Any) -> None:
    assert max(script.levels(script.room_graph()).values()) <= MOST_LEVELS


def test_the_picture_is_that_of_the_code(script: Any) -> None:
    """`python docs/import_levels.py` draws it anew."""
    assert script.PICTURE.read_text() == script.picture()


def test_the_root_has_few_files() -> None:
    files = sorted(path.name for path in PACKAGE.iterdir() if path.is_file())
    assert len(files) <= MOST_ROOT_FILES, files


def test_nothing_is_over_its_budget() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = path.relative_to(PACKAGE), path.read_text()
        if text.count("\n") > MOST_LINES["file"]:
            found.add(f"{name}: file")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 > MOST_LINES[kind]:
                    found.add(f"{name}: {kind} {node.name}")
    assert found == set()


def test_the_documented_tree_is_that_of_the_package() -> None:
    """Each folder and each file at the root has its line in `docs/architecture.md`, and no other has."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(r"^```text\nlightning_parallel/\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    listed, above = [], ""
    for indent, name in re.findall(r"^( +)(\S+) +\S", tree, flags=re.MULTILINE):
        above = name if len(indent) == 4 else above
        listed.append(name if len(indent) == 4 else above + name)
    folders = {path.parent.relative_to(PACKAGE).as_posix() + "/" for path in PACKAGE.rglob("*.py")} - {"./"}
    assert len(listed) == len(set(listed))
    assert set(listed) == folders | {path.name for path in PACKAGE.glob("*.py")}
    assert len(listed) == len(tree.splitlines())


def test_the_flow_names_files_that_exist() -> None:
    """The pages for readers of the code name files relative to the package."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    _, tree, rest = re.split(r"^```(?:text)?$", text, maxsplit=2, flags=re.MULTILINE)
    assert tree
    names = re.findall(r"`([\w/]+(?:/|\.py))`", rest)
    missing = [name for name in names if not (PACKAGE / name).exists() and not (ROOT / name).exists()]
    assert missing == []
    assert len(names) > 20
