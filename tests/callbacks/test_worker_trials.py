"""`tune_workers` finds how many workers help, and changes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler

from lightning_parallel import ConfigurationError, tune_workers
from lightning_parallel.callbacks.worker_trials import WorkerTrials, default_counts


class Slow(Dataset[Tensor]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.05)
        self.read.append(index)
        return torch.rand(()) + random.random() + float(np.random.rand()) + index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for number in range(400):
            time.sleep(0.002)
            yield number


def state(generator: torch.Generator) -> tuple[Any, ...]:
    draws = (torch.rand(()).item(), random.random(), float(np.random.rand()))
    return (*draws, generator.get_state().tolist())


@pytest.mark.parametrize("kind", ["shuffled", "batches", "single"])
def test_two_workers_are_faster_than_one(kind: str) -> None:
    data, generator = Slow(), torch.Generator().manual_seed(1)
    sampler = RandomSampler(data, generator=generator)
    options: dict[str, Any] = {
        "shuffled": {"batch_size": 5, "sampler": sampler},
        "batches": {"batch_sampler": BatchSampler(sampler, 5, drop_last=True)},
        "single": {"batch_size": None, "sampler": sampler},
    }
    loader = DataLoader(data, generator=generator, **options[kind])
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    expected = state(generator)
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    found = tune_workers(loader, counts=[0, 2], seconds=0.3)
    assert state(generator) == expected
    assert found.rates[0] == pytest.approx(20 if kind == "single" else 4, rel=0.5)
    assert found.rates[2] > 1.2 * found.rates[0]
    assert found.best == 2
    assert loader.num_workers == 0
    assert str(found).startswith("with 0, 2 workers the loader gives ")


def test_a_stream_is_read_by_workers_alone() -> None:
    loader = DataLoader(Stream(), batch_size=4)
    assert 0 not in default_counts(loader)
    assert tune_workers(loader, counts=[1], seconds=0.1).rates[1] > 1


def test_which_number_is_chosen() -> None:
    found = WorkerTrials({1: 10.0, 2: 19.0, 4: 20.0, 8: 12.0})
    assert (found.best, found.enough_for(9.0), found.enough_for(15.0), found.enough_for(100.0)) == (2, 1, 2, 2)
    assert default_counts(DataLoader(Slow()), num_processes=10**6) == [0, 1]


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match="tune_workers has a list"):
        tune_workers([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="has no numbers of workers"):
        tune_workers(DataLoader(Slow()), counts=[])
