"""The script for sbatch: its options, and what it runs, with made-up commands in place of SLURM's."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_parallel.launch.command import Command
from lightning_parallel.launch.job import Folder, Job
from lightning_parallel.launch.slurm import Request, slurm_name_violations, slurm_script

OPTIONS = {
    "account",
    "array",
    "begin",
    "comment",
    "constraint",
    "cpus-per-gpu",
    "cpus-per-task",
    "dependency",
    "error",
    "exclude",
    "exclusive",
    "export",
    "gpus",
    "gpus-per-node",
    "gpus-per-task",
    "gres",
    "job-name",
    "mail-type",
    "mail-user",
    "mem",
    "mem-per-cpu",
    "mem-per-gpu",
    "nodelist",
    "nodes",
    "no-requeue",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "partition",
    "qos",
    "requeue",
    "reservation",
    "signal",
    "time",
    "wrap",
}
"""Of the manual of sbatch; those that are common."""
COMMAND = Command(("fit", "--config", "a recipe.yaml", "--model.text=$HOME"))


def script(**options: Any) -> str:
    job = Job("lm", 2, 8, COMMAND, cpus=4, folders=[Folder("logs", is_lasting=False)])
    return slurm_script(job, Request(time="1:00:00", account="a", partition="p"), setup=[". ./env"], **options)


def run(folder: Path, text: str) -> Any:
    (folder / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (folder / "srun").chmod(0o755)
    (folder / "env").write_text("")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    return subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_its_options_are_those_of_sbatch() -> None:
    lines = [line for line in script().splitlines() if line.startswith("#SBATCH")]
    given = dict(re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line).groups() for line in lines)  # type: ignore[union-attr]
    assert set(given) <= OPTIONS
    wanted = {"nodes": "2", "ntasks-per-node": "8", "gpus-per-node": "8", "signal": "SIGUSR1@90", "open-mode": "append"}
    assert wanted.items() <= given.items()
    assert "requeue" in given
    assert script().startswith("#!/bin/bash\n#SBATCH")  # behind the first command they would not count


def test_a_job_goes_on_from_its_own_newest_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    old = tmp_path / "logs" / "last.ckpt"
    old.write_text("of another job")
    os.utime(old, (1, 1))
    first = run(tmp_path, script())
    assert first.returncode == 0, first.stderr
    words = first.stdout.splitlines()
    at = words.index("lightning-parallel")
    assert tuple(words[at + 1 :]) == (*COMMAND.words, "--trainer.default_root_dir=lm-7")
    again = run(tmp_path, script())
    assert "ckpt_path" not in again.stdout  # nothing was saved
    for number, path in enumerate(["lm-7/hpc_ckpt_1.ckpt", "logs/version_1/last-v1.ckpt", "lm-7/hpc_ckpt_2.ckpt"], 1):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("")
        time = os.stat(tmp_path / "lm-7" / ".begun-7").st_mtime + number  # noqa: PTH116
        os.utime(tmp_path / path, (time, time))
        assert run(tmp_path, script()).stdout.splitlines()[-1] == f"--ckpt_path={path}"


def test_the_checkpoint_of_another_job_is_refused(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "hpc_ckpt_1.ckpt").write_text("")
    done = run(tmp_path, script(root="given"))
    assert done.returncode == 2
    assert "of another job" in done.stderr
    assert done.stdout == ""


def test_what_slurm_or_lightning_would_misunderstand() -> None:
    assert all(slurm_name_violations(name) for name in ("bash", "interactive", "a b", ""))
    assert slurm_name_violations("lm.1") == []
    wrong = Request(time="soon", partition="a b", account="x\n#SBATCH", gres="gpu:h100:4")
    assert len(wrong.violations(8)) == 4
    assert Request(time="1-12", gres="gpu:h100:8").violations(8) == []


@pytest.mark.parametrize("name", ["validate", "test", "predict"])
def test_only_a_fit_goes_on(name: str) -> None:
    text = slurm_script(Job("lm", 1, 2, Command((name,)), has_gpus=False), Request())
    assert "resume" not in text
    assert "gpus" not in text
