"""Values that callbacks give to loggers, past the metrics of the module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_info

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class MeterLog:
    """Gives values to the loggers of a trainer, and says once what does not work.

    Args:
        name: The callback's, with which each sentence begins.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._said: set[str] = set()

    def say(self, sentence: str) -> None:
        """Tell the user, once."""
        if sentence not in self._said:
            self._said.add(sentence)
            rank_zero_info(f"{self._name}: {sentence}")

    def write(self, trainer: Trainer, values: Mapping[str, float], step: int) -> None:
        """Log on rank 0, through each logger that can.

        Args:
            trainer: The trainer.
            values: By name.
            step: The step to which they belong, as Lightning counts them for loggers.
        """
        if not trainer.is_global_zero:
            return
        if not trainer.loggers:
            self.say("there is no logger, so values are only in the attribute latest; give Trainer(logger=...)")
        for logger in trainer.loggers:
            try:
                logger.log_metrics(dict(values), step=step)
            except Exception as error:  # of a logger that is not ours, for which training should not end
                self.say(f"{type(logger).__name__} cannot log: {type(error).__name__}: {error}")
