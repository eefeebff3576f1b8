"""A recipe's trainer, module and data for a run of a command: nothing is logged, saved or evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, Checkpoint, DeviceStatsMonitor, LearningRateMonitor
from typing_extensions import override

from lightning_parallel.cli.lightning_cli import LightningCLI

_QUIET: dict[str, Any] = {
    "num_nodes": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "fast_dev_run": False,
    "max_time": None,
    "min_epochs": None,
    "min_steps": None,
    "num_sanity_val_steps": 0,
}


class RecipeCLI(LightningCLI):
    """Reads a recipe as `fit` does, and puts other arguments of the Trainer in their places.

    Args:
        overrides: These arguments.
        args: The recipe's arguments.
        callbacks: More callbacks. Those of the recipe stay, but for the ones that save checkpoints or need a logger.
    """

    left_out: tuple[type[Callback], ...] = (Checkpoint, DeviceStatsMonitor, LearningRateMonitor)

    def __init__(self, overrides: Mapping[str, Any], *, args: list[str], callbacks: list[Any]) -> None:
        self._overrides = {**_QUIET, **overrides}
        super().__init__(
            run=False,
            args=args,
            save_config_callback=None,
            seed_everything_default=1,
            trainer_defaults={"callbacks": callbacks},
        )

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        for name, value in self._overrides.items():
            trainer[name] = value
        super().before_instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        given = self._get(self.config_init, "trainer").get("callbacks") or []
        given = given if isinstance(given, list) else [given]
        kwargs["callbacks"] = [each for each in given if not isinstance(each, self.left_out)]
        return super().instantiate_trainer(**kwargs)
