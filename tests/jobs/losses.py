"""What is said of losses that are not the mean over the ranks that read different samples."""

from __future__ import annotations

from contextlib import AbstractContextManager

from tests.jobs.first_steps import said

SAYS = (
    "the loss is a sum",
    "the loss of a batch",
    "norm normalizes",
    "the gradient of a batch",
    "the loss for which",
    "the gradient of a loss for which",
    "in step",
    "losses of later steps",
)


def lines() -> AbstractContextManager[list[str]]:
    """What is said of losses."""
    return said(*SAYS)
