"""Change the parallelism of a PyTorch Lightning recipe by swapping one argument, on an unchanged LightningModule.

Importing the package registers its names for ``Trainer(strategy=...)`` and changes nothing else.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_parallel.callbacks.worker_trials import tune_workers
    from lightning_parallel.checkpoint.full_state import full_state_dict
    from lightning_parallel.cli.explain import explain
    from lightning_parallel.cli.lightning_cli import LightningCLI
    from lightning_parallel.dtypes import DtypePolicy
    from lightning_parallel.errors import (
        CheckpointError,
        ConfigurationError,
        FirstStepError,
        NonFiniteError,
        RanksDifferError,
    )
    from lightning_parallel.presets import build_strategy
    from lightning_parallel.ranks.degrees import Degrees
    from lightning_parallel.strategies.data_parallel import DataParallelStrategy
    from lightning_parallel.strategies.ddp import DDPStrategy
    from lightning_parallel.strategies.mesh import MeshStrategy
    from lightning_parallel.strategies.zero import ZeroStrategy

__version__ = "0.1.0"

__all__ = [
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
]

_MODULES = {
    "CheckpointError": "errors",
    "ConfigurationError": "errors",
    "DDPStrategy": "strategies.ddp",
    "DataParallelStrategy": "strategies.data_parallel",
    "Degrees": "ranks.degrees",
    "DtypePolicy": "dtypes",
    "FirstStepError": "errors",
    "LightningCLI": "cli.lightning_cli",
    "MeshStrategy": "strategies.mesh",
    "NonFiniteError": "errors",
    "RanksDifferError": "errors",
    "ZeroStrategy": "strategies.zero",
    "build_strategy": "presets",
    "explain": "cli.explain",
    "full_state_dict": "checkpoint.full_state",
    "tune_workers": "callbacks.worker_trials",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for: the command line alone needs jsonargparse, and its help not even torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


if not (sys.argv and Path(sys.argv[0]).name == "lightning-parallel"):
    from lightning_parallel.presets import register

    register()
