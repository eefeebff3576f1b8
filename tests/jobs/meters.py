"""A logger that keeps what meters give it."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.loggers import Logger


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
