"""The command ``doctor``, in processes of its own, and its report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.callbacks.metered_steps import MeteredWindow
from lightning_parallel.cli.doctor import doctor
from lightning_parallel.cli.doctor_report import Examination, draw
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.memory import MemoryUse
from tests.cli.command import ROOT, evaluated_recipe


def command(folder: Path, *arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = folder / "lightning-parallel"  # the other rank is started with it, too
    script.write_text("from lightning_parallel.cli.main import main\nmain()\n")
    line = [sys.executable, str(script), "doctor", *arguments]
    return subprocess.run(line, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_a_recipe_is_examined(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    recipe = ["--config", evaluated_recipe(tmp_path), "--strategy=ddp_custom", "--trainer.devices=2"]
    done = command(tmp_path, *recipe, "--steps=8", f"--report={path}")
    assert done.returncode == 0, done.stdout + done.stderr
    text = path.read_text()
    assert text.startswith("# ddp_custom\n\n## What holds it up\n\n")
    assert "| rank | data | copy | forward | backward | optimizer | checkpoint | other | together |" in text
    assert "\n| 1 | " in text
    assert "samples a second" in text
    assert "ms of communication that nothing hides" in text
    assert f"the report is in {path}" in done.stdout
    assert "Traceback" not in done.stderr
    assert "args parameter" not in done.stderr


WINDOWS = [
    MeteredWindow(4, 3, [{"data": 0.1, "forward": 0.2, "backward without reduction": 0.0}], 24.0, MemoryUse(2**30)),
    MeteredWindow(5, 1, [{"data": 0.5, "forward": 0.2, "backward without reduction": 0.0}], 8.0, MemoryUse(2**30)),
]


def test_what_the_report_says() -> None:
    found = Examination("fsdp_custom", WINDOWS, [], [], {"throughput/mfu": 0.25})
    assert found.to_markdown("").split("\n\n") == [
        "# fsdp_custom",
        "## What holds it up",
        "Nothing that costs a tenth of an update, in 2 windows.",
        "## Where an update goes",
        "Milliseconds, in the mean over 4 updates:",
        "| rank | data | forward | together |\n| ---: | ---: | ---: | ---: |\n| 0 | 200 | 200 | 400 |",
        "- at most 1 GiB of memory on a rank\n- 0.25 MFU\n",
    ]
    named = Examination("fsdp_custom", WINDOWS, ["it waits"], [0.01, 0.002], {}).to_markdown("a.png")
    assert "- it waits\n" in named
    assert "- 2 ms of communication that nothing hides" in named
    assert named.endswith("![An update on each rank](a.png)\n")
    assert "too few updates" in Examination("fsdp_custom", [], [], [], {}).to_markdown("")


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(WINDOWS, tmp_path / "update.png")
    assert (tmp_path / "update.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        doctor(["--steps=2", "--report=nowhere/at/all.md"])
    assert len(caught.value.violations) == 2
