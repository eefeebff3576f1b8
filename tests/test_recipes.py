"""Every recipe runs as its page in the cookbook says, on two ranks or four, and learns.

Those of a few seconds run in test_cookbook.py. Here are those of minutes, as commands of their own.
"""

from __future__ import annotations

import contextlib
import csv
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import yaml

from tests.cli.command import run
from tests.cookbook import LONG, check_seen, commands

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.parent.name for path in (ROOT / "recipes").glob("*/config.yaml"))
GOALS = {
    "byte_lm": ("val_bpb", 0.0, 2.6),
    "digits": ("val_acc", 0.97, 1.0),
    "hf_gpt2": ("val_bpb", 0.0, 4.0),
    "long_context": ("val_bpb", 0.0, 3.3),
    "pipeline_llama": ("val_bpb", 0.0, 3.0),
    "three_d": ("val_bpb", 0.0, 3.0),
}
"""Recipe of minutes -> what it has to reach: a metric, and its bounds."""
WHOLE = os.environ.get("RECIPES") == "whole"
"""Whether recipes run to their ends (`RECIPES=whole`, six minutes on two cores) or for the first part of an epoch."""
FIRST_PART = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=0.3", "--trainer.limit_val_batches=0.5"]
EARLY_GOALS = {"byte_lm": 4.0, "hf_gpt2": 3.8, "long_context": 4.5, "pipeline_llama": 3.8, "three_d": 3.5}
"""Recipe -> bits per byte after that part; a model that has learnt nothing has 8."""
OWN_STRATEGIES = {
    "custom_plan": "tp_custom:tensor_plan={query: colwise, key: colwise, value: colwise, output: rowwise}",
    "float8": "fsdp_custom:float8=tensorwise:emulate",
    "long_context": "cp_custom",
    "offload": "fsdp_offload_custom:recompute=full",
    "pipeline_llama": "pp_custom",
    "slow_network": "fsdp_custom:accumulation_sync=last",
    "three_d": "fsdp_custom:tensor=2,pipeline=2,shard=auto",
}
"""Recipe that is about a strategy -> that strategy, in the string of `--strategy`; the others name none."""
SLOWEST = 600
"""Seconds after which a recipe hangs; it takes a fraction of that where nothing else runs."""


def test_every_recipe_of_minutes_is_tested() -> None:
    assert tuple(GOALS) == LONG


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_chooses_and_computes_nothing(recipe: str) -> None:
    text = (ROOT / "recipes" / recipe / "config.yaml").read_text()
    assert text.count("\n") <= 60
    assert text.startswith(f"# lightning-parallel fit --config recipes/{recipe}/config.yaml")
    config = yaml.safe_load(text)
    assert config.get("strategy") == OWN_STRATEGIES.get(recipe)
    assert "strategy" not in config["trainer"]
    # A script, or a notebook, has no config and imports the package, in the place of it.
    for path in (ROOT / "recipes" / recipe).glob("*.py"):
        source = path.read_text()
        assert not any(word in source for word in ("torch.distributed", "world_size", "lightning_parallel", ".cuda("))


@pytest.mark.filterwarnings("ignore:.*will be overridden by `LightningCLI.configure_optimizers`")
@pytest.mark.parametrize("recipe", RECIPES)
def test_eight_devices_are_a_matter_of_one_argument(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the commands in the first lines would do on eight ranks, without starting them."""
    monkeypatch.chdir(ROOT)
    lines = (ROOT / "recipes" / recipe / "config.yaml").read_text().splitlines()
    found = [shlex.split(line)[3:] for line in lines if line.startswith("# lightning-parallel fit")]
    of_eight = [words for words in found if "--trainer.devices=8" in words]
    assert of_eight
    for words in of_eight:
        given = [word for word in words if not word.startswith("--ckpt_path")]
        assert run(monkeypatch, "explain", *given, "--trainer.accelerator=cpu") == 0
        assert "refused" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("recipe", GOALS)
def test_recipe(recipe: str, tmp_path: Path) -> None:
    is_part = not WHOLE and recipe in EARLY_GOALS
    # The launcher starts the other ranks by the name of a script, so it needs one.
    script = tmp_path / "lightning-parallel"
    script.write_text("from lightning_parallel.cli.main import main\nmain()\n")
    command = [
        *(sys.executable, str(script), *commands(recipe)[0], *(FIRST_PART if is_part else ())),
        f"--trainer.logger.init_args.save_dir={tmp_path}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    # A session of its own: ranks that the launcher started would go on without it.
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=PIPE, stderr=STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=SLOWEST)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-3000:]
    (metrics,) = tmp_path.rglob("metrics.csv")
    name, least, most = GOALS[recipe]
    most = EARLY_GOALS[recipe] if is_part else most
    with metrics.open() as file:
        values = [float(row[name]) for row in csv.DictReader(file) if row.get(name)]
    assert least <= values[-1] <= most
    check_seen(recipe, printed, is_whole=not is_part)
    assert "Epoch" in printed  # the progress bar
