"""The command in this process, and a config for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from lightning_parallel.cli import main

ROOT = Path(__file__).parents[2]

CONFIG: dict[str, Any] = {
    "seed_everything": 3,
    "trainer": {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    },
    "model": {"class_path": "tests.models.cli_module.Module"},
    "data": {"class_path": "tests.models.cli_module.Data"},
}


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command in this process; its exit status."""
    monkeypatch.setattr(sys, "argv", ["lightning-parallel", *arguments])
    before = dict(os.environ)
    try:
        main.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def evaluated_recipe(folder: Path) -> str:
    """A recipe with every entry point, as a file in `folder`."""
    path = folder / "recipe.yaml"
    model = {"class_path": "tests.models.cli_module.Evaluated"}
    data = {"class_path": "tests.models.cli_module.EvaluatedData"}
    path.write_text(yaml.safe_dump({**CONFIG, "model": model, "data": data}))
    return str(path)
