"""The versions with which the whole suite was run: one file says so, and a newer version than these is noticed."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
RUNS = json.loads((ROOT / "tests" / "constraints" / "seen.json").read_text())["runs"]
SOME = [
    {"day": "2026-01-01", "torch": "2.15.0", "lightning": "2.6.5"},
    {"day": "2026-02-02", "torch": "2.15.0", "lightning": "2.6.6"},
    {"day": "2026-03-03", "torch": "2.13.0", "lightning": "2.6.6"},
]


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script with which `.ci/run` looks for newer versions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / ".ci")
        import unseen

        yield unseen


def test_runs_are_of_the_window(script: Any) -> None:
    for run in RUNS:
        assert set(run) == {"day", "torch", "lightning", "python", "passed", "skipped"}
        assert datetime.date.fromisoformat(run["day"])
        assert run["passed"] > 0
        for name in script.NAMES:
            assert run[name] in script.window(name).specifier


def test_readme_names_the_file() -> None:
    assert "tests/constraints/seen.json" in (ROOT / "README.md").read_text()


def test_the_newest_is_that_of_the_window(script: Any) -> None:
    allowed = Requirement("torch>=2.11,<2.16")
    assert script.newest(["2.16.0", "2.15.0+cpu", "2.9.1", "2.14.1"], allowed) == "2.15.0"
    assert script.newest(["2.16.0", "2.15.0rc1"], allowed) is None
    assert script.newest([], allowed) is None


def test_seen_are_versions_that_ran_together(script: Any) -> None:
    assert script.seen_on({"torch": "2.15.0", "lightning": "2.6.6"}, SOME) == "2026-02-02"
    assert script.seen_on({"torch": "2.13.0", "lightning": "2.6.5"}, SOME) is None


@pytest.mark.parametrize(
    ("answers", "printed", "said"),
    [
        ({"torch": "2.15.9", "lightning": "2.6.6, 2.6.5"}, "torch==2.15.9 lightning==2.6.6\n", ""),
        ({"torch": "2.15.0", "lightning": "2.6.6, 2.6.5"}, "", "passed on 2026-02-02"),
        ({"torch": "2.15.9", "lightning": ""}, "", "no package index answers"),
    ],
    ids=["newer", "seen", "no network"],
)
def test_what_is_printed(
    answers: dict[str, str],
    printed: str,
    said: str,
    script: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def answer(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        listed = answers[command[-1]]
        text = f"{command[-1]} (...)\nAvailable versions: {listed}\n  INSTALLED: 1\n" if listed else ""
        return subprocess.CompletedProcess(command, 0 if listed else 1, text, "")

    monkeypatch.setattr(subprocess, "run", answer)
    (tmp_path / "seen.json").write_text(json.dumps({"runs": SOME}))
    monkeypatch.setattr(script, "SEEN", tmp_path / "seen.json")
    script.main()
    out, err = capsys.readouterr()
    assert out == printed
    assert re.search(said, err)
