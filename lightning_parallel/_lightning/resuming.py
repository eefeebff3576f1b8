"""The checkpoint that a run begins with: private names of Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def before_loading(trainer: Trainer, look: Callable[[Any], None]) -> None:
    """Call `look` once with the checkpoint with which the next run of `trainer` begins, on all ranks, also for none.

    Lightning asks the strategy to load one on those ranks alone that have found one. The connector's `resume_start` is
    called on all of them, since 1.6; no public hook is.

    Args:
        trainer: The trainer.
        look: Takes the path, or ``None``.
    """
    connector = trainer._checkpoint_connector
    vars(connector)["resume_start"] = functools.partial(_look_first, connector, look)


def _look_first(connector: Any, look: Callable[[Any], None], path: Any = None, **options: Any) -> None:
    vars(connector).pop("resume_start", None)
    look(path)
    connector.resume_start(path, **options)
