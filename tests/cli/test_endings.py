"""The command in processes of its own: what it answers at once, and its last lines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.command import CONFIG, ROOT
from tests.models import cli_module

NAME = "lightning-parallel"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The command as it is installed: the ranks start it again."""
    path = tmp_path / NAME
    path.write_text("from lightning_parallel.cli.main import main\nmain()\n")
    return path


def command(script: Path, *arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, str(script), *arguments]
    return subprocess.run(
        line, env=environment, cwd=script.parent, capture_output=True, text=True, timeout=120, check=False
    )


def recipe(folder: Path, **trainer: Any) -> str:
    path = folder / "recipe.yaml"
    model = {"class_path": f"{cli_module.__name__}.{cli_module.Failing.__name__}"}
    data = {"class_path": f"{cli_module.__name__}.EvaluatedData"}
    path.write_text(
        yaml.safe_dump({**CONFIG, "trainer": {**CONFIG["trainer"], **trainer}, "model": model, "data": data})
    )
    return str(path)


@pytest.mark.parametrize(("given", "words"), [("--help", "strategies [NAME]"), ("--version", "lightning_parallel 0.")])
def test_answers_before_anything_is_imported(tmp_path: Path, given: str, words: str) -> None:
    script = tmp_path / NAME
    then = "import sys\nassert not {'torch', 'lightning'} & set(sys.modules), 'imported'\n"
    script.write_text(f"from lightning_parallel.cli.main import main\nmain()\n{then}")
    done = command(script, given)
    assert done.returncode == 0, done.stderr
    assert words in done.stdout


def test_explain_names_itself(script: Path) -> None:
    done = command(script, "explain", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: lightning-parallel explain ")


@pytest.mark.slow
def test_the_end_of_a_fit_says_how_to_test_it(script: Path, tmp_path: Path) -> None:
    arguments = ["fit", "--config", recipe(tmp_path, enable_checkpointing=True), "--trainer.devices=2"]
    done = command(script, *arguments, "--strategy=fsdp_custom")
    assert done.returncode == 0, done.stderr
    said = (done.stdout + done.stderr).splitlines()
    assert not [line for line in said if "Tip" in line or "LeafSpec" in line]
    (line,) = [line for line in said if line.startswith("to test it: ")]
    name, *rest = shlex.split(line.removeprefix("to test it: "))
    assert (name, rest[0]) == (NAME, "test")
    again = command(script, *rest)
    assert again.returncode == 0, again.stderr
    assert "test_loss" in again.stdout


@pytest.mark.slow
@pytest.mark.parametrize("on", [0, 1])
def test_a_failing_run_ends_with_the_first_rank_and_its_error(script: Path, tmp_path: Path, on: int) -> None:
    arguments = ["fit", "--config", recipe(tmp_path), "--trainer.devices=2", "--strategy=ddp_custom"]
    done = command(script, *arguments, f"--model.on={on}")
    assert done.returncode != 0
    assert done.stderr.count("Traceback (most recent call last)") == 1
    first = f"rank {on} raised ValueError: no such sample"
    place = f"{cli_module.__file__}:"
    of_rank = [line for line in done.stderr.splitlines() if line.startswith(f"lightning-parallel: {first} ({place}")]
    assert len(of_rank) == 1
    assert first in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_what_the_first_step_refuses_is_said_once(script: Path, tmp_path: Path) -> None:
    arguments = ["fit", "--config", recipe(tmp_path), "--trainer.devices=2", "--model.differs=true"]
    done = command(script, *arguments, "--strategy=fsdp_custom:check=first_step")
    assert done.returncode == 2
    assert done.stderr.count("lightning-parallel: ") == 1, done.stderr
    assert "lightning-parallel: the first step under MeshStrategy(shard=2) is not that of one process" in done.stderr
    assert "Traceback" not in done.stderr
