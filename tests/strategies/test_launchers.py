"""Ranks of a notebook, which has no script to run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import make_trainer, trainer_for

NAMES = ["ddp_custom", "zero1_custom", "fsdp_custom"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_with_one_device_starts_no_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    for start_method in ("popen", "fork", "spawn"):
        trainer_for(f"{name}:start_method={start_method}", 1).fit(ByteGPT(), loader(1, 1))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_with_more_devices_is_told_how(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    with pytest.raises(ConfigurationError, match="give start_method='fork', or devices=1"):
        make_trainer(build_strategy(name), 2)


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="start_method='thread' is unknown here; possible: popen, "):
        make_trainer(build_strategy("fsdp_custom:start_method=thread"), 2)


CELL = """
import sys
sys.ps1 = ">>> "
import lightning as L
from tests.data import loader
from tests.models.cases import ByteGPT
from tests.parity import TOLERANCE, difference, trainer_for

weights = []
for name, number in (("auto", 1), (sys.argv[1] + ":start_method=fork", 2)):
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(name, number)
    trainer.fit(module := ByteGPT("adamw"), loader(number))
    weights.append(dict(module.state_dict()))
assert difference(*weights) <= TOLERANCE
print("equal, with", len(trainer.callback_metrics), "metrics")
"""


FAILING = """
from tests.models import habits
from tests.strategies.test_habits import fitted

if __name__ == "__main__":
    try:
        fitted(habits.Transposed, "fsdp_custom:start_method=fork", 2)
    except Exception as error:
        print(error)
"""


@pytest.mark.slow
def test_an_error_of_a_forked_rank_has_its_notes() -> None:
    command = [sys.executable, "-c", FAILING]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert "torch does not know how to compute this on parts of a tensor" in done.stdout, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
def test_ranks_are_forked_from_a_notebook(name: str) -> None:
    """The weights come back to the process of the notebook."""
    command = [sys.executable, "-c", CELL, name]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal, with 1 metrics" in done.stdout
