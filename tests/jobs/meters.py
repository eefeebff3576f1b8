"""A clock for meters that goes on by hand; what they give to loggers, and what they say."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_parallel.callbacks.step_clock import HostClock


class Ticks(HostClock):
    """A clock that goes on by hand, so that a busy machine changes nothing."""

    now = 0.0

    def mark(self) -> float:
        return Ticks.now


def spend(seconds: float) -> None:
    Ticks.now += seconds


class Long(torch.autograd.Function):
    """The same value, with a backward that takes some seconds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        spend(ctx.seconds)
        return grad, None


class Noted(Logger):
    """Keeps what it is given."""

    name, version = "noted", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def __init__(self, prefix: str = "throughput/") -> None:
        super().__init__()
        self.prefix = prefix
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        if any(name.startswith(self.prefix) for name in metrics):
            self.rows.append((step, dict(metrics)))


class _Keep(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What this rank says inside of this context, if it is the one that speaks."""
    logger, keep = logging.getLogger("lightning.pytorch.utilities.rank_zero"), _Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        yield keep.said
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
