"""The deliberate faults can still be put in: a patch that no longer applies would be a test that nobody runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks import mutants
from tests.benchmarks.mutants import Mutant, load_mutants, violations


def test_every_fault_applies() -> None:
    found = load_mutants()
    assert len(found) >= 60
    assert violations(found) == []


def test_what_does_not_apply_is_said(tmp_path: Path) -> None:
    (tmp_path / "file.py").write_text("a = 1\na = 1\n")
    (tmp_path / "test.py").write_text("")
    faults = [
        Mutant("gone", "file.py", "b = 1", "b = 2", "test.py"),
        Mutant("twice", "file.py", "a = 1", "a = 2", "test.py"),
        Mutant("twice", "none.py", "a = 1", "a = 2", "test.py"),
        Mutant("no tests", "test.py", "", "", "none.py -k x"),
    ]
    words = ["twice is there twice", "gone: file.py has the text 0 times", "file.py has the text 2 times", "none.py"]
    found = violations(faults, tmp_path)
    assert all(any(word in each for each in found) for word in words), found


@pytest.mark.parametrize(("test", "outcome"), [("assert A == 1", "caught"), ("assert A", "SURVIVED"), ("", "NO TEST")])
def test_a_fault_is_caught_by_a_test_that_fails(tmp_path: Path, test: str, outcome: str) -> None:
    (tmp_path / "file.py").write_text("A = 1\n")
    body = f"def test_it():\n    {test}\n" if test else ""
    (tmp_path / "test_file.py").write_text(f"from file import A\n{body}")
    assert mutants.run(Mutant("other", "file.py", "A = 1", "A = 2", "test_file.py"), tmp_path).startswith(outcome)
    assert (tmp_path / "file.py").read_text() == "A = 1\n"
