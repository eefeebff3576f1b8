from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import lightning.pytorch.strategies as registry
import pytest
from lightning.pytorch import Callback

import lightning_parallel
from lightning_parallel import callbacks
from lightning_parallel.presets import PRESETS, register

PUBLIC = {
    "CheckpointError",
    "ConfigurationError",
    "DDPStrategy",
    "DataParallelStrategy",
    "Degrees",
    "DtypePolicy",
    "FirstStepError",
    "LightningCLI",
    "MeshStrategy",
    "NonFiniteError",
    "RanksDifferError",
    "ZeroStrategy",
    "build_strategy",
    "explain",
    "full_state_dict",
    "tune_workers",
}
CALLBACKS = {
    "BatchSizeFinder",
    "DevicePrefetch",
    "Doctor",
    "ExponentialMovingAverage",
    "GlobalBatch",
    "GpuMonitor",
    "GradientNorm",
    "NonFinite",
    "PretrainedWeights",
    "RankLogs",
    "ScaledLearningRate",
    "StepBreakdown",
    "Throughput",
    "TokenWeighted",
    "Verify",
}
ROOT = Path(__file__).parents[1]


def test_names() -> None:
    assert set(lightning_parallel.__all__) == PUBLIC
    assert all(hasattr(lightning_parallel, name) for name in PUBLIC)
    assert set(callbacks.__all__) == CALLBACKS
    assert all(issubclass(getattr(callbacks, name), Callback) for name in CALLBACKS)


def test_names_are_in_docs_and_changelog() -> None:
    for document in ("api.md", "changelog.md"):
        text = (ROOT / "docs" / document).read_text()
        assert [name for name in PUBLIC | set(PRESETS) if name not in text] == [] or document == "api.md"
        assert [name for name in PUBLIC | CALLBACKS if name not in text] == []


def test_registration_is_idempotent() -> None:
    before = dict(registry.StrategyRegistry)
    register()
    assert dict(registry.StrategyRegistry) == before
    assert set(PRESETS) <= set(before)


@pytest.mark.slow
def test_import_changes_nothing_else() -> None:
    code = (
        "import os, warnings, logging, lightning, sys\n"
        "before = dict(os.environ), list(warnings.filters), dict(logging.root.manager.loggerDict), sys.excepthook\n"
        "import lightning_parallel\n"
        "assert before[0] == dict(os.environ)\n"
        "assert before[1] == list(warnings.filters)\n"
        "assert not [n for n in logging.root.manager.loggerDict if 'lightning_parallel' in n]\n"
        "assert before[3] is sys.excepthook\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", sorted((ROOT / "lightning_parallel").rglob("*.py")), ids=lambda p: p.name)
def test_public_things_have_docstrings_with_one_call(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name
            if node.name in (PUBLIC | CALLBACKS) - {"Degrees"}:
                assert ">>>" in str(ast.get_docstring(node)), f"{node.name} shows no call"
