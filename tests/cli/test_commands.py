"""The four commands that run a recipe, on two ranks and in one process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_parallel.cli import main
from tests.cli.command import ROOT, evaluated_recipe
from tests.models import cli_module
from tests.parity import TOLERANCE

SEEN = {"fit": {"loss", "val_loss"}, "validate": {"val_loss"}, "test": {"test_loss"}, "predict": {"predictions"}}
"""Command -> what it ends with."""


def command(*arguments: str) -> dict[str, list[float]]:
    """The command in this process, and what the module has seen in it."""
    cli_module.SEEN.clear()
    with (
        mock.patch.object(sys, "argv", ["lightning-parallel", *arguments]),
        mock.patch.object(sys, "path", [str(ROOT), *sys.path]),
        mock.patch.dict(os.environ),
    ):
        main.main()
    return dict(cli_module.SEEN)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    return evaluated_recipe(tmp_path)


@pytest.mark.parametrize("name", ["ddp_custom", "fsdp_custom"])
@pytest.mark.parametrize("given", SEEN)
def test_commands(ranks: Any, recipe: str, given: str, name: str) -> None:
    expected = command(given, "--config", recipe, "--trainer.devices=1", "--trainer.num_sanity_val_steps=0")
    arguments = given, "--config", recipe, f"--strategy={name}", "--trainer.devices=2"
    found = ranks(2).run(command, *arguments, "--trainer.num_sanity_val_steps=0")
    assert [set(each) for each in found] == [set(expected)] * 2 == [SEEN[given]] * 2
    for key in ("val_loss", "test_loss"):
        if key in expected and given != "fit":  # in training, two ranks take steps of twice as many samples
            assert [each[key] for each in found] == [pytest.approx(expected[key], abs=TOLERANCE)] * 2
    if given == "predict":
        together = sorted(number for each in found for number in each["predictions"])
        assert together == pytest.approx(sorted(expected["predictions"]), abs=TOLERANCE)
