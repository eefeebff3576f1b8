"""`GpuMonitor`: what devices and hosts do meanwhile, read by a thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from rich.console import Console
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.host_process import HOST_NAMES, open_process
from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.meter_windows import MeteredRanks
from lightning_parallel.callbacks.monitor_table import LiveTable, build_table
from lightning_parallel.callbacks.nvml_device import NVML_NAMES, Source, UnavailableError, open_nvml
from lightning_parallel.callbacks.sampler import Sampler
from lightning_parallel.errors import check

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

NAMES = (*NVML_NAMES, *HOST_NAMES)
_MOST = ("memory_gib", "temperature", "process_memory_gib")
"""Figures of which the most is logged; of the others, it is the mean."""


class GpuMonitor(Callback):
    """Log what the device of each rank and its host do: utilization, memory, power, temperature, throttling.

    A thread reads the figures once a second, the driver's by NVML and the host's by psutil, which both come with the
    extra ``monitor``. After each `every` updates, all ranks tell what they were meanwhile, and they are logged with
    ``monitor/rank0/`` and so on before their names: percentages, power and throttling in the mean, memory and
    temperature the most. What is not there is left out, and said once. Nothing waits for the device.

    Args:
        every: Updates between two logs.
        seconds: The time between two readings.
        table: Whether rank 0 shows them in a table on the terminal, too.

    Attributes:
        latest: The values that were logged last, by name; on all ranks, those of all.

    Raises:
        ConfigurationError: If arguments do not fit.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[GpuMonitor(every=20)])
    """

    def __init__(self, *, every: int = 50, seconds: float = 1.0, table: bool = False) -> None:
        check(_violations(every, seconds))
        self.latest: dict[str, float] = {}
        self._every, self._seconds, self._has_table = every, seconds, table
        self._log = MeterLog("GpuMonitor")
        self._sources: list[Source] = []
        self._sampler: Sampler | None = None
        self._table: LiveTable | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.latest = {}
        self._num_updates, self._at, self._row = 0, 0, [math.nan] * len(NAMES)
        self._ranks = MeteredRanks.of(trainer)
        self._sources = self._opened(trainer.strategy.root_device)
        if self._has_table and trainer.is_global_zero:
            self._table = LiveTable(Console())
        if self._sources:
            self._sampler = Sampler(self._read, self._seconds)

    def _opened(self, device: torch.device) -> list[Source]:
        """The sources that are there; says once which are not."""
        found: list[Source] = []
        openers: tuple[Callable[[], Source], ...] = (lambda: open_nvml(device), open_process)
        for opens in openers:
            try:
                source = opens()
            except UnavailableError as error:
                self._log.say(str(error))
                continue
            found.append(source)
            if source.missing:
                self._log.say(f"{', '.join(source.missing)} are left out: the driver does not offer them here")
        return found

    def _read(self) -> list[float]:
        values: dict[str, float] = {}
        for source in self._sources:
            values |= dict(zip(source.names, source.read(), strict=True))
        return [values.get(name, math.nan) for name in NAMES]

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _lightning.is_accumulating(trainer):
            return
        self._num_updates += 1
        self._at = _lightning.logs.logged_step(trainer)
        if self._num_updates % self._every == 0:
            self._tell(trainer)

    def _tell(self, trainer: Trainer, *, at_end: bool = False) -> None:
        """Log what all ranks have read. A collective of hosts."""
        if at_end and self._sampler is not None:
            self._sampler.stop()
        rows = [] if self._sampler is None else self._sampler.taken()
        if at_end and not rows and all(map(math.isnan, self._row)) and self._sampler is not None:
            rows = self._sampler.read_once()
        if self._sampler is not None and self._sampler.error is not None:
            error = self._sampler.error
            self._log.say(f"figures could not be read any more: {type(error).__name__}: {error}")
        self._row = pooled(rows) if rows else self._row
        of_ranks = self._ranks.of_all(self._row)
        named = {
            f"monitor/rank{rank}/{name}": value
            for rank, row in enumerate(of_ranks)
            for name, value in zip(NAMES, row, strict=True)
            if not math.isnan(value)
        }
        if not named:
            return
        self.latest = named
        self._log.write(trainer, named, self._at)
        if self._table is not None:
            self._table.show(build_table(NAMES, of_ranks))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Of a training shorter than the time between two readings, there is one from its end.
        if self._num_updates % self._every or (self._num_updates and not self.latest):
            self._tell(trainer, at_end=True)
        self._close()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        is_over = self._sampler is None or self._sampler.stop()
        self._sampler = None
        for source in self._sources if is_over else ():
            source.close()
        self._sources = []
        if self._table is not None:
            self._table.close()
            self._table = None


def pooled(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each figure, the mean over `rows`, or the most; what is missing in some is that of the others."""
    found = []
    for name, column in zip(NAMES, zip(*rows, strict=True), strict=True):
        known = [value for value in column if not math.isnan(value)]
        value = max(known, default=math.nan) if name in _MOST else math.nan
        found.append(sum(known) / len(known) if known and name not in _MOST else value)
    return found


def _violations(every: int, seconds: float) -> list[str]:
    found = []
    if every < 1:
        found.append(f"GpuMonitor(every={every}) is no number of updates; give 1 or more")
    if not seconds > 0:
        found.append(f"GpuMonitor(seconds={seconds}) is no time between two readings; give more than 0, such as 1")
    return found
