"""`tune_workers`: how many batches a second a loader gives with each number of workers."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.random_streams import unchanged_generators

_HOST = torch.device("cpu")
_CLOSE = 0.9
"""The part of the best rate that is as good: more workers take more memory."""


@dataclass(frozen=True)
class WorkerTrials:
    """The batches a second that were found.

    Args:
        rates: Number of workers -> batches a second, once they are under way.
    """

    rates: dict[int, float]

    @property
    def best(self) -> int:
        """The smallest number of workers that is within a tenth of the best rate."""
        return self.enough_for(float("inf"))

    def enough_for(self, rate: float) -> int:
        """The smallest number of workers that gives `rate` batches a second, or comes close to the most there is."""
        wanted = min(rate, _CLOSE * max(self.rates.values()))
        return min(number for number, found in self.rates.items() if found >= wanted)

    def __str__(self) -> str:
        numbers = ", ".join(str(number) for number in self.rates)
        rates = ", ".join(f"{rate:.3g}" for rate in self.rates.values())
        return f"with {numbers} workers the loader gives {rates} batches a second"


def tune_workers(loader: DataLoader[Any], *, counts: Sequence[int] | None = None, seconds: float = 1.0) -> WorkerTrials:
    """Read some batches of `loader` with several numbers of workers, and tell how many come in a second.

    The loader stays as it is, and no default generator changes. Samples are those of its data set, in an order of the
    trial's own: in order where the loader's is, else at random. Nothing is copied to a device, or pinned. Where each
    of several ranks has a loader, call it on all of them at once, as they share their machine.

    Args:
        loader: The loader.
        counts: Numbers of workers; by default 1, 2, 4 and so on up to the cores of this process, and 0, which reads in
            this process, where the data set has indices.
        seconds: The least time for which batches are counted, for each number.

    Raises:
        ConfigurationError: If it is no loader of torch's, or there is no number to try.

    Example:
        >>> tune_workers(DataLoader(data, batch_size=32)).best
        4
    """
    if not isinstance(loader, DataLoader):
        raise ConfigurationError([f"tune_workers has a {type(loader).__name__}; give a torch.utils.data.DataLoader"])
    chosen = default_counts(loader) if counts is None else sorted(set(counts))
    if not chosen or chosen[0] < 0:
        raise ConfigurationError([f"tune_workers(counts={counts}) has no numbers of workers; give some of 0 or more"])
    with unchanged_generators(_HOST):
        rates = {number: _rate(loader, number, seconds) for number in chosen}
    return WorkerTrials({number: rate for number, rate in rates.items() if rate is not None} or {chosen[0]: 0.0})


def default_counts(loader: DataLoader[Any], num_processes: int = 1) -> list[int]:
    """Numbers of workers to try.

    Args:
        loader: The loader.
        num_processes: Processes that share this machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(1, cores // num_processes)
    doubled = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return [*([] if isinstance(loader.dataset, IterableDataset) else [0]), *doubled]


def _rate(loader: DataLoader[Any], number: int, seconds: float) -> float | None:
    """Batches a second; ``None`` where there are too few to tell."""
    generator = torch.Generator().manual_seed(0)
    tried = _torch.loaders.with_workers(loader, number, generator)
    if not isinstance(loader.dataset, IterableDataset):
        order = _Endless(loader, generator)
        if loader.batch_sampler is None:
            tried = _torch.loaders.with_samples(tried, order)
        else:
            tried = _torch.loaders.with_batches(tried, order, loader.sampler)
    batches = iter(tried)
    # What workers have made by then is not what they can make in a second.
    for _ in range(1 + number * (tried.prefetch_factor or 0)):
        if next(batches, None) is None:
            return None
    began = time.perf_counter()
    for read in count(1):
        if next(batches, None) is None:
            return None if read == 1 else (read - 1) / (time.perf_counter() - began)
        if read > number and time.perf_counter() - began >= seconds:
            return read / (time.perf_counter() - began)
    return None


class _Endless:
    """Indices without an end: batches of a loader's size, or single ones where it makes no batches.

    Args:
        loader: The loader.
        generator: What to draw from.
    """

    def __init__(self, loader: DataLoader[Any], generator: torch.Generator) -> None:
        self._length, self._generator = len(loader.dataset), generator  # type: ignore[arg-type]
        noting = loader.batch_sampler or loader.sampler
        batches: Any = getattr(noting, "batches", noting)  # a strategy may note what is read
        sampler = batches.sampler if type(batches) is BatchSampler else batches
        self._is_in_order = type(sampler) is SequentialSampler
        self._size = None if loader.batch_sampler is None else _size_of(batches)

    def __iter__(self) -> Iterator[Any]:
        for start in count(step=self._size or 1):
            number = self._size or 1
            if self._is_in_order:
                found = [each % self._length for each in range(start, start + number)]
            else:
                found = torch.randint(self._length, (number,), generator=self._generator).tolist()
            yield found[0] if self._size is None else found


def _size_of(batches: Any) -> int:
    size = getattr(batches, "batch_size", None)
    return size if isinstance(size, int) else len(next(iter(copy.deepcopy(batches)), [0]))
