"""Figures of a process and its machine, by psutil."""

from __future__ import annotations

import importlib
from typing import Any

from lightning_parallel.callbacks.fit_summary import GIB
from lightning_parallel.callbacks.nvml_device import UnavailableError

HOST_NAMES = ("process_cpu_percent", "process_memory_gib", "host_cpu_percent", "host_memory_percent")
"""Of the process, 100 percent for each core that it keeps busy; of the machine, 100 percent for all of them."""


class HostProcess:
    """The figures of this process and of its machine, since the last time that they were read.

    Args:
        psutil: The module.
    """

    names: tuple[str, ...] = HOST_NAMES

    def __init__(self, psutil: Any) -> None:
        self.missing: list[str] = []
        self._psutil, self._process = psutil, psutil.Process()
        self.read()

    def read(self) -> list[float]:
        """A figure for each of `names`."""
        return [
            float(self._process.cpu_percent(None)),
            self._process.memory_info().rss / GIB,
            float(self._psutil.cpu_percent(None)),
            float(self._psutil.virtual_memory().percent),
        ]

    def close(self) -> None:
        """Do nothing."""


def open_process() -> HostProcess:
    """The figures of this process.

    Raises:
        UnavailableError: If psutil is not installed, or may not look.
    """
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        raise UnavailableError("the figures of the host need psutil; pip install lightning_parallel[monitor]") from None
    try:
        return HostProcess(psutil)
    except (psutil.Error, OSError) as error:
        raise UnavailableError(f"psutil could not be used: {error}") from None
