"""Runs Lightning's tests in processes of their own, and reads how each ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.lightning_suite.plugin import RUNNING

ROOT = Path(__file__).parents[2]
FOLDER = "tests/tests_pytorch/"


@dataclass(frozen=True)
class Outcome:
    """How a test ended: ``"passed"``, ``"skipped"``, ``"xfailed"``, ``"failed"`` or ``"died"``, and its error."""

    kind: str
    error: str = ""


def run(
    checkout: Path, strategy: str, paths: Sequence[str], file: Path, *, start_ranks: bool = False
) -> dict[str, Outcome]:
    """Run tests of Lightning with `strategy` in the place of the default one.

    A test that ends the process, or waits for ever, has died; the others go on without it.

    Args:
        checkout: Of Lightning.
        strategy: The name.
        paths: Of tests, relative to ``tests/tests_pytorch`` there.
        file: Where outcomes are noted. Tests that it has already do not run again.
        start_ranks: Run tests that start ranks, with `strategy` in the place of Lightning's DDP, too.

    Returns:
        Name of the test -> how it ended.
    """
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"),
        *("-p", "tests.lightning_suite.plugin", f"--in-place-of-default={strategy}", f"--outcomes={file}"),
        *(["--start-ranks"] if start_ranks else []),
        # Of torch 2.13, about a function that Lightning itself calls.
        "-Wignore:torch.distributed.nn.functional:FutureWarning",
        "--override-ini=addopts=--strict-markers --disable-pytest-warnings",
        *(f"{FOLDER}{path}" for path in paths),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(checkout / "tests")])}
    while True:
        before = len(lines_of(file))
        ended = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
        noted = lines_of(file)
        test, kind, _ = (noted or [["", "", ""]])[-1]
        # Of a rank that failed, Lightning ends the first process too, at times only after the test was noted: go on
        # with the tests that are left, if there are any.
        if kind != RUNNING and ended.returncode == -signal.SIGKILL and len(noted) > before:
            continue
        if kind != RUNNING:
            break
        errors = file.with_suffix(".errors")
        said = (errors.read_text() if errors.exists() else "") or ended.stderr[-1000:]
        errors.unlink(missing_ok=True)
        with file.open("a") as lines:
            lines.write(json.dumps([test, "died", said]) + "\n")
    if ended.returncode not in (0, 1, 5):
        raise RuntimeError(f"pytest ended with {ended.returncode}:\n{ended.stdout[-3000:]}{ended.stderr[-3000:]}")
    return read(file)


def read(file: Path) -> dict[str, Outcome]:
    """What `file` has of tests that have ended."""
    return {test.removeprefix(FOLDER): Outcome(kind, error) for test, kind, error in lines_of(file) if kind != RUNNING}


def lines_of(file: Path) -> list[list[str]]:
    """The lines of `file`: a test, how it ended or that it runs, and its error."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
