"""The pages of the cookbook: their commands, and what they say one sees."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "cookbook"
PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
HEADINGS = ["Question", "Command", "What you see", "How it works", "What it costs", "When not to"]
LONG = ("byte_lm", "digits", "hf_gpt2", "long_context", "pipeline_llama", "three_d")
"""Recipes of minutes: test_cookbook.py runs two batches of them, and compares the lines above the first `...`.
test_recipes.py runs a part of them, and all, with the other lines, if it is asked."""
TOLERANCE = 0.05
"""Of numbers with a point: processors and versions of torch round in other ways, and training takes it further."""


def section(page: str, heading: str) -> str:
    """What stands below a heading of a page of the cookbook."""
    parts = re.split(r"^## (.*)\n", (FOLDER / f"{page}.md").read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def fenced(page: str, heading: str, language: str) -> str:
    """The first block of that language below a heading."""
    found = re.search(rf"^```{language}\n(.*?)^```", section(page, heading), flags=re.MULTILINE | re.DOTALL)
    assert found is not None, f"{page} has no block of {language} below {heading!r}"
    return found[1]


def commands(page: str) -> list[list[str]]:
    """The words of each command of a page, behind `lightning-parallel`."""
    lines = fenced(page, "Command", "bash").replace("\\\n", " ").splitlines()
    split = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in split if words[:1] == ["lightning-parallel"]]


def check_seen(page: str, printed: str, *, is_whole: bool = True) -> None:
    """Fail unless the lines below "What you see" are in `printed`, in their order.

    `...` stands for anything, and numbers with a point are compared with `TOLERANCE`.
    """
    text, start = " ".join(printed.split()), 0
    for line in fenced(page, "What you see", "text").splitlines():
        if line.strip() == "..." and not is_whole:
            return
        if line.strip() in ("", "..."):
            continue
        words = " ".join(line.split())
        pattern = re.sub(r"\d+\\\.\d+", r"(\\d+\\.\\d+)", re.escape(words)).replace(r"\.\.\.", ".{0,300}?")
        found = re.compile(pattern).search(text, start)
        assert found is not None, f"{words!r} is not in, behind what came before,\n{printed}"
        said = re.findall(r"\d+\.\d+", words)
        assert [float(each) for each in found.groups()] == pytest.approx([float(each) for each in said], rel=TOLERANCE)
        start = found.end()


def num_ranks(words: list[str]) -> int:
    """How many ranks a command is for."""
    given = [word.partition("=")[2] for word in words if word.startswith("--trainer.devices=")]
    return int(given[-1]) if given else 1
