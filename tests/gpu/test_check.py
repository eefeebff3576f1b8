"""The checks for a machine with a GPU, as far as a CPU can run them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.check import SECTIONS, main
from tests.gpu.machine import Check

ROOT = Path(__file__).parents[2]
NUM_RANKS = {name: 1 for name in SECTIONS if name.startswith(("setup", "step", "host", "memory", "float8"))}
"""Two ranks for the others."""


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_sections(tmp_path: Path, section: str) -> None:
    out = tmp_path / "checks.jsonl"
    command = [sys.executable, "-m", "tests.gpu.check", section, "--accelerator", "cpu", "--out", str(out)]
    command += ["--ranks", str(NUM_RANKS.get(section, 2))]
    environment = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert found
    assert all(line["name"].startswith(section) for line in found)
    assert not [line for line in found if line["ok"] is False]
    if section in ("parity", "rng", "kernels", "compile"):
        assert any(line["ok"] for line in found)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("check", "ok"),
    [
        (Check("a", 1.0, 1.0), True),
        (Check("a", 1.1, 1.0), False),
        (Check("a", math.nan, 1.0), False),
        (Check("a", 0.5, 0.4, is_least=True), True),
        (Check("a", 0.3, 0.4, is_least=True), False),
        (Check("a", 0.3), None),
        (Check("a", why="needs a GPU"), None),
        (Check("a", why="RuntimeError", has_failed=True), False),
    ],
)
def test_limits(check: Check, ok: bool | None) -> None:
    assert check.ok is ok
    assert json.loads(check.to_json())["ok"] is ok


@pytest.mark.fast
def test_what_is_no_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["timing", "--accelerator", "cpu"])
    assert "there is no section timing; there are setup, " in capsys.readouterr().err
