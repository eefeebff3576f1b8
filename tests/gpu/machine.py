"""The ranks of a check, their device, and one line for each thing that was checked."""

from __future__ import annotations

import gc
import json
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_parallel.presets import PRESETS
from tests.gpu.models import Module, Size, tokens

NO_GPU = "needs a GPU"


@dataclass(frozen=True)
class Check:
    """One line of the result.

    Args:
        name: The thing that was checked.
        value: What was measured; ``None`` if nothing could be.
        limit: The most that it may be, or the least with ``is_least``; ``None`` where it is not judged.
        is_least: Whether `limit` is the least.
        why: Why there is no value, or the error.
        has_failed: Whether it ended in an error.
    """

    name: str
    value: float | None = None
    limit: float | None = None
    is_least: bool = False
    why: str = ""
    has_failed: bool = False

    @property
    def ok(self) -> bool | None:
        """Whether the limit holds; ``None`` where nothing is judged."""
        if self.has_failed:
            return False
        if self.value is None or self.limit is None:
            return None
        return self.value >= self.limit if self.is_least else self.value <= self.limit  # a NaN is neither

    def to_json(self) -> str:
        """A line."""
        return json.dumps({**asdict(self), "ok": self.ok})


def tried(name: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """Checks; an error is one that has failed, and ends these alone."""
    try:
        yield from checks()
    except Exception as error:
        places = " < ".join(
            f"{Path(frame.filename).name}:{frame.lineno} {frame.name}"
            for frame in reversed(traceback.extract_tb(error.__traceback__)[-8:])
        )
        yield Check(name, why=f"{type(error).__name__}: {error}"[:2500] + f" ({places})", has_failed=True)


class SharedGPU(CUDAAccelerator):
    """The first GPU, as often as there are ranks: Lightning gives each device to one rank."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    @override
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cuda", 0) for _ in devices]


@dataclass(frozen=True)
class Machine:
    """This rank, and those beside it.

    Args:
        accelerator: ``"cpu"`` or ``"cuda"``.
        num_ranks: All ranks, on this machine.
        is_shared: Whether they share the first GPU.
        only: The names that are wanted; all if it is empty.
    """

    accelerator: str
    num_ranks: int
    is_shared: bool
    only: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        if self.accelerator == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", 0 if self.is_shared else int(os.environ["LOCAL_RANK"]))

    @property
    def has_gpu(self) -> bool:
        """Whether there is anything that a CPU does not have: memory of its own, kernels, synchronisation."""
        return self.device.type == "cuda"

    @property
    def names(self) -> list[str]:
        """The names that so many ranks, one or two, can show, as far as they are wanted."""
        whole = ["dp_custom", "ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "fsdp_offload_custom"]
        shared = [name for name in PRESETS if name not in ("dp_custom", "fsdp_tp_custom")]
        if self.is_shared:  # with 2.11, gathers of DTensors over gloo crash on a GPU, and a rank that sends ends
            shared = [name for name in shared if name not in ("tp_custom", "pp_custom")]
        names = whole if self.num_ranks == 1 else shared
        return [name for name in names if not self.only or name in self.only]

    def trainer(self, strategy: Any, **arguments: Any) -> L.Trainer:
        """A quiet trainer on all ranks; ``strategy=None`` is plain Lightning on this rank alone."""
        is_alone = strategy is None
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        return L.Trainer(
            accelerator=SharedGPU() if self.is_shared and not is_alone else self.accelerator,
            devices=1 if is_alone else self.num_ranks,
            strategy=SingleDeviceStrategy(self.device) if is_alone else strategy,
            **{"max_epochs": 1, **quiet, **arguments},
        )

    def built(self, size: Size, optimizer: str = "adamw") -> Module:
        """A module on the device: a processor takes long to draw a billion numbers."""
        with self.device:
            return Module(size, optimizer=optimizer)

    def fit(
        self, strategy: Any, module: Module, size: Size, steps: int, readers: int = 1, **arguments: Any
    ) -> L.Trainer:
        """Train `steps` steps, each on the samples of `readers` ranks."""
        trainer = self.trainer(strategy, **arguments)
        trainer.fit(module, self.loader(size, steps, readers, of_all=strategy is None))
        return trainer

    @staticmethod
    def loader(size: Size, steps: int, readers: int, *, of_all: bool = False) -> DataLoader[Any]:
        """The samples of `steps` steps of so many readers, in batches of one of them, or `of_all`."""
        return DataLoader(tokens(size, steps * size.batch * readers), size.batch * (readers if of_all else 1))

    def largest(self, value: float) -> float:
        """The largest of all ranks. A collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return value
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return float(torch.tensor(values, dtype=torch.float64).max())

    def peak_of(self, action: Callable[[], object]) -> int:
        """The most bytes that `action` allocates on the device at once, beyond what was there."""
        gc.collect()  # trainers that are done refer to themselves
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        action()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def readers_of(name: str, num_ranks: int) -> int:
    """How many ranks read different samples."""
    return 1 if name in ("cp_custom", "tp_custom", "pp_custom") else num_ranks
