"""Docstrings begin with a noun or a verb, and comments use the words of the glossary in docs/architecture.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_parallel"
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))
QUESTION = re.compile(r"\s*(What|How|Why|Which|Who)\b")
LEVEL = re.compile(r"\bLayer \d")
DROPPED = re.compile(r"\b(ghost|footprint|passage|anatomy|stand[-_]in|rehearsal)s?\b", re.IGNORECASE)


def strings_on_their_own(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings: those of modules, classes and functions, and those below an assignment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(source: str) -> list[str]:
    docstrings = list(strings_on_their_own(source))
    module = ast.get_docstring(ast.parse(source)) or ""
    return [
        *(f"line {line} begins with a question: {text[:60]}" for line, text in docstrings if QUESTION.match(text)),
        *(f"line {line} has a dropped word: {text[:60]}" for line, text in docstrings if DROPPED.search(text)),
        *(f"line {line} has a dropped word: {text}" for line, text in comments(source) if DROPPED.search(text)),
        *(["the module's docstring names a level, which the picture shows"] if LEVEL.search(module) else []),
    ]


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_docstrings_and_comments(path: Path) -> None:
    assert faults((PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""How it works."""',
        '"""Steps. Layer 3."""',
        'def f() -> None:\n    """Which ranks."""',
        'x = 1\n"""What it is."""',
        "x = 1  # a ghost",
        'class A:\n    """Two stand-ins."""',
    ],
)
def test_faults_are_found(source: str) -> None:
    assert len(faults(source)) == 1
