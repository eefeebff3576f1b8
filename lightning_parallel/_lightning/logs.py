"""Steps under which values are logged: private names of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def logged_step(trainer: Trainer) -> int:
    """The step under which `trainer` gives values to loggers now.

    `_TrainingEpochLoop._batches_that_stepped`, since 1.5; waits for a public property.
    """
    return trainer.fit_loop.epoch_loop._batches_that_stepped
