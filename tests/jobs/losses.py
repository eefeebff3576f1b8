"""What is said of losses that are not the mean over the ranks that read different samples."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

SAYS = (
    "the loss is a sum",
    "the loss of a batch",
    "norm normalizes",
    "the gradient of a batch",
    "in step",
    "losses of later steps",
)


@contextmanager
def lines() -> Iterator[list[str]]:
    """What is said of losses."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith(SAYS):
                found.append(record.getMessage())

    logger, handler = logging.getLogger("lightning.pytorch.utilities.rank_zero"), Handler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
