"""Change the parallelism of a PyTorch Lightning recipe by swapping one argument, on an unchanged LightningModule.

Importing the package registers its names for ``Trainer(strategy=...)`` and changes nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_parallel.checkpoint.full_state import full_state_dict
from lightning_parallel.cli.explain import explain
from lightning_parallel.dtypes import DtypePolicy
from lightning_parallel.errors import ConfigurationError, FirstStepError, RanksDifferError
from lightning_parallel.presets import build_strategy, register
from lightning_parallel.ranks.degrees import Degrees
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from lightning_parallel.strategies.ddp import DDPStrategy
from lightning_parallel.strategies.mesh import MeshStrategy
from lightning_parallel.strategies.zero import ZeroStrategy

if TYPE_CHECKING:
    from lightning_parallel.cli.lightning_cli import LightningCLI

__version__ = "0.1.0"

__all__ = [
    "ConfigurationError",
    "DDPStrategy",
    "DataParallelStrategy",
    "Degrees",
    "DtypePolicy",
    "FirstStepError",
    "LightningCLI",
    "MeshStrategy",
    "RanksDifferError",
    "ZeroStrategy",
    "build_strategy",
    "explain",
    "full_state_dict",
]

register()


def __getattr__(name: str) -> Any:
    """Import the command line, and jsonargparse with it, when it is asked for: nothing else needs them."""
    if name == "LightningCLI":
        from lightning_parallel.cli.lightning_cli import LightningCLI

        return LightningCLI
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
