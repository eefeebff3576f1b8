"""The ranks of a check, their device, and one line for each thing that was checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
    """

    accelerator: str
    num_ranks: int
    is_shared: bool

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
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        action()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before


def names_on(num_ranks: int) -> list[str]:
    """The names that so many ranks, one or two, can show."""
    if num_ranks == 1:
        return ["dp_custom", "ddp_custom", "zero1_custom", "zero2_custom", "fsdp_custom", "fsdp_offload_custom"]
    return [name for name in PRESETS if name not in ("dp_custom", "fsdp_tp_custom")]


def readers_of(name: str, num_ranks: int) -> int:
    """How many ranks read different samples."""
    return 1 if name in ("cp_custom", "tp_custom", "pp_custom") else num_ranks
