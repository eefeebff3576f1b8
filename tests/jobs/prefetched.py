"""Fits whose batches are read ahead, or are not, and what they come to."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_parallel import full_state_dict
from lightning_parallel.callbacks import DevicePrefetch
from tests.jobs.meters import heard
from tests.parity import trainer_for

NUM_SAMPLES = 48
LATE = (17, 26, 31)
"""Samples that are behind the third batch of the first epoch."""


class Numbers(Dataset[Tensor]):
    """Samples that are their index, with what `draw` adds; it notes the thread in which they are read."""

    def __init__(self, kind: str = "") -> None:
        self.kind, self.threads = kind, set[str]()

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return torch.tensor(float(index)) + draw(self.kind, index)


def draw(kind: str, index: int) -> Any:
    """A number for a sample; of some samples only, behind the first batches, where `kind` begins with "late"."""
    if kind.startswith("late") and index not in LATE:
        return 0.0
    match kind.removeprefix("late "):
        case "torch":
            return torch.rand(())
        case "dropout":
            return torch.nn.functional.dropout(torch.ones(()), 0.5)
        case "seeded":
            with torch.random.fork_rng():
                torch.manual_seed(index)
                return torch.rand(())
        case "python":
            return random.random()
        case "numpy":
            return float(np.random.rand())
    return 0.0


class Stream(IterableDataset[Tensor]):
    """One stream for all epochs, which goes on where the last one has ended."""

    def __init__(self) -> None:
        self.numbers = map(float, range(10**6))

    def __iter__(self) -> Iterator[Tensor]:
        yield from map(torch.tensor, self.numbers)


class Uneven(IterableDataset[Tensor]):
    """More samples on one rank than on the other."""

    def __iter__(self) -> Iterator[Tensor]:
        rank = torch.distributed.get_rank()
        yield from map(torch.tensor, map(float, range(rank, 40 + 13 * rank)))


class Draws(L.LightningModule):
    """Dropout in the step; keeps each loss, with the random state that hooks find."""

    def __init__(self, draws: str = "") -> None:
        super().__init__()
        self.linear, self.draws = torch.nn.Linear(4, 4), draws
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(0.002)
        values = torch.nn.functional.dropout(torch.stack([batch / NUM_SAMPLES, batch.sin()] * 2, -1), 0.5)
        loss: Tensor = (self.linear(values) + draw(self.draws, batch_idx)).square().mean()
        self.seen.append((self.current_epoch, batch_idx, batch.tolist(), loss.item()))
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        numbers = float(torch.rand(())), random.random() if self.draws == "python" else 0.0
        self.seen.append(numbers)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.seen.append((random.random(), float(np.random.rand())))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def threads() -> list[str]:
    """Threads that read ahead."""
    return [each.name for each in threading.enumerate() if "read-ahead" in each.name]


def fit(
    strategy: str, num_ranks: int, *, ahead: int = 0, kind: str = "", draws: str = "", **kwargs: Any
) -> dict[str, Any]:
    """Two epochs, with batches that are read `ahead`, or with none."""
    L.seed_everything(3, verbose=False)
    of_loader = {name: kwargs.pop(name) for name in ("num_workers", "sampler") if name in kwargs}
    data: Any = {"stream": Stream, "uneven": Uneven}[kind]() if kind in ("stream", "uneven") else Numbers(kind)
    if "sampler" in of_loader:
        of_loader["sampler"] = of_loader["sampler"](data)
    elif isinstance(data, Numbers):
        of_loader["shuffle"] = True
    loader = DataLoader(data, batch_size=4, **of_loader)
    validated = {"val_dataloaders": DataLoader(Numbers(), batch_size=24)} if "val_check_interval" in kwargs else {}
    module, callbacks = Draws(draws), [DevicePrefetch(ahead=ahead)] if ahead else []
    trainer = trainer_for(strategy, num_ranks, **{"max_epochs": 2, "callbacks": callbacks, **kwargs})
    with heard() as said, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="after 10 training batches rank 0 has none left")
        trainer.fit(module, loader, **validated)
    return {
        "seen": module.seen,
        "weights": full_state_dict(trainer),
        "random": (float(torch.rand(())), random.random(), float(np.random.rand())),
        "said": [each for each in said if "DevicePrefetch" in each],
        "threads": {name for name in getattr(data, "threads", ()) if "read-ahead" in name},
        "left": threads(),
    }
