# python tests/benchmarks/mutants.py
"""Deliberate faults, one at a time, each against the tests that should fail: which of them does no test notice?

A fault is an entry of `mutants.toml`: a name, a file, the text to find in it, what to put there, and a selection of
tests. It is put into a copy of the tree, never into the tree itself. The exit status is 1 if a fault survives, or if
the text is no longer there exactly once. One takes half a minute to two minutes on two cores; this is no part of CI.

    python tests/benchmarks/mutants.py --list
    python tests/benchmarks/mutants.py --only audit-left-out --only static-graph-ignored
    python tests/benchmarks/mutants.py --check     # only whether each can still be put in
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("mutants.toml")
COPIED = ("lightning_parallel", "recipes", "tests", "docs", "pyproject.toml")
LIMIT = 600.0
"""Seconds that the tests of a fault may take. One that makes ranks wait for each other ends with their deadline."""
FAILED, NONE_SELECTED = 1, 5
"""Exit statuses of pytest."""


@dataclass(frozen=True)
class Mutant:
    """A deliberate fault.

    Args:
        name: Its name.
        file: The file, from the root.
        find: What is there, exactly once.
        replace: What to put in its place.
        tests: Arguments of pytest that select what should fail.
    """

    name: str
    file: str
    find: str
    replace: str
    tests: str


def load_mutants() -> list[Mutant]:
    return [Mutant(**entry) for entry in tomllib.loads(TABLE.read_text())["mutant"]]


def applied(mutant: Mutant, root: Path) -> str:
    """The text of the file with the fault in it.

    Raises:
        ValueError: If what should be replaced is not there exactly once, or the tests are not there.
    """
    path = root / mutant.file
    text = path.read_text() if path.is_file() else ""
    if (count := text.count(mutant.find)) != 1:
        raise ValueError(f"{mutant.name}: {mutant.file} has the text {count} times instead of once: {mutant.find!r}")
    if not (root / shlex.split(mutant.tests)[0]).is_file():
        raise ValueError(f"{mutant.name}: there is no {shlex.split(mutant.tests)[0]}")
    changed = text.replace(mutant.find, mutant.replace)
    compile(changed, mutant.file, "exec")  # a fault that cannot be imported would fail every test
    return changed


def violations(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """Reasons why faults cannot be put in; empty if they can."""
    names = [mutant.name for mutant in mutants]
    found = [f"{name} is there twice" for name in sorted({name for name in names if names.count(name) > 1})]
    for mutant in mutants:
        try:
            applied(mutant, root)
        except (ValueError, SyntaxError) as error:
            found.append(str(error))
    return found


def run(mutant: Mutant, tree: Path) -> str:
    """Put the fault into `tree`, run its tests there, and take it out again; the outcome in a word."""
    path = tree / mutant.file
    before = path.read_text()
    path.write_text(applied(mutant, tree))
    arguments = ["-x", "-q", "-p", "no:cacheprovider", *shlex.split(mutant.tests)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("PYTEST_ADDOPTS", None)  # options of a run from which this one is started
    try:
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return "caught (too slow)"
    finally:
        path.write_text(before)
    if done.returncode == FAILED:
        return "caught"
    if done.returncode == NONE_SELECTED:
        return "NO TEST SELECTED"
    return (
        "SURVIVED" if done.returncode == 0 else f"ERROR {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


def main() -> int:
    """Run what the arguments choose; 0 if every fault was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names and the tests, and run nothing")
    parser.add_argument("--check", action="store_true", help="only see whether each fault can be put in")
    parser.add_argument("--clean", action="store_true", help="run the tests without any fault: do they pass in a copy?")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="run this one; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at once")
    given = parser.parse_args()
    mutants = load_mutants()
    if unknown := set(given.only) - {mutant.name for mutant in mutants}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in mutants if not given.only or mutant.name in given.only]
    if given.list:
        print("\n".join(f"{mutant.name:42} {mutant.tests}" for mutant in chosen))
        return 0
    if found := violations(chosen):
        print("\n".join(found))
        return 1
    print(f"{len(chosen)} faults can be put in")
    if given.clean:
        clean = [replace(mutant, replace=mutant.find) for mutant in chosen]
        return run_all(clean, expected="SURVIVED", jobs=given.jobs)
    return 0 if given.check else run_all(chosen, jobs=given.jobs)


def run_all(mutants: list[Mutant], *, expected: str = "caught", jobs: int = 1) -> int:
    """Run `mutants`, each in a copy of the tree; 1 if the outcome of any is another one.

    Args:
        mutants: The faults.
        expected: How their outcomes begin.
        jobs: How many run at once.
    """
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as executor:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            trees.put(copied(Path(folder) / str(number)))

        def outcome_of(mutant: Mutant) -> str:
            tree, start = trees.get(), time.monotonic()
            try:
                outcome = run(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{mutant.name:42} {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
            return outcome

        outcomes = list(executor.map(outcome_of, mutants))
    num_expected = sum(outcome.startswith(expected) for outcome in outcomes)
    print(f"{num_expected} of {len(mutants)} {expected.lower()}")
    return 0 if num_expected == len(mutants) else 1


def copied(tree: Path) -> Path:
    """A copy of what tests need, in a new folder."""
    tree.mkdir()
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        copy(ROOT / name, tree / name)
    return tree


if __name__ == "__main__":
    sys.exit(main())
