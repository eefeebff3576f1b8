"""The command ``verify``, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.cli.verify import verify
from lightning_parallel.errors import ConfigurationError
from tests.cli.command import ROOT, evaluated_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return evaluated_recipe(tmp_path)


def command(*arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-c", "from lightning_parallel.cli.main import main; main()", "verify", *arguments]
    return subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_recipe_is_verified(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "certificate.json"
    done = command("--config", recipe, "--strategy=fsdp_custom", "--updates=2", f"--certificate={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["passed"]
    assert found["strategy"] == "fsdp_custom"
    assert (found["num_ranks"], found["num_readers"], found["num_updates"]) == (2, 2, 2)
    outcomes = {each["subject"]: each["outcome"] for each in found["findings"]}
    compared = ("first step", "samples", "losses", "weights", "validate", "test", "predict", "resuming")
    assert {subject: outcomes[subject] for subject in compared} == dict.fromkeys(compared, "equal")
    assert found["versions"]["torch"]
    assert done.stdout.splitlines()[-1].startswith("equal to one process")


def test_what_fit_refuses_is_refused(recipe: str) -> None:
    done = command("--config", recipe, "--strategy=tp_custom")
    assert done.returncode == 2
    assert done.stderr.startswith("lightning-parallel: ")
    assert "stack" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        verify(["--ranks=1000", "--updates=0", "--tolerance=nan", "--certificate=nowhere/at/all.json"])
    assert len(caught.value.violations) == 4
    assert "--ranks=1000: this machine has" in str(caught.value)
