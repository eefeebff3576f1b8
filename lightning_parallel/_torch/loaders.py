"""Loaders of batches: private names of torch."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader


def with_batches(loader: DataLoader[Any], batches: Iterable[list[int]], sampler: object) -> DataLoader[Any]:
    """Copy `loader`, with other batches of the same samples.

    `DataLoader._iterator`, since 1.7: an iterator of `persistent_workers` would go on with the batches of before. A
    loader refuses other batches once it is made; waits for one that can be told its batches.

    Args:
        loader: A loader with a batch sampler.
        batches: The indices of each batch.
        sampler: What is told the number of an epoch.
    """
    other = copy.copy(loader)
    vars(other).update(batch_sampler=batches, sampler=sampler, _iterator=None)
    return other


def with_samples(loader: DataLoader[Any], sampler: Iterable[Any]) -> DataLoader[Any]:
    """Copy `loader`, which makes no batches, with other samples. `DataLoader._iterator`, as in `with_batches`."""
    other = copy.copy(loader)
    vars(other).update(sampler=sampler, _iterator=None)
    return other


def indices_of(iterator: Any) -> Any:
    """The iterator over indices from which an iterator over a loader takes its own.

    `_BaseDataLoaderIter._sampler_iter`, since 1.2; waits for a public name.
    """
    return getattr(iterator, "_sampler_iter", None)


def num_read(iterator: Any) -> int:
    """Number of batches that an iterator over a loader has given, without those that workers have made ahead.

    `_BaseDataLoaderIter._num_yielded`, since 1.5; waits for a public count.
    """
    return int(getattr(iterator, "_num_yielded", 0))


def with_workers(loader: DataLoader[Any], number: int, generator: torch.Generator) -> DataLoader[Any]:
    """Copy `loader`, with another number of workers, which are seeded from `generator`.

    `DataLoader._iterator`, as in `with_batches`; waits for a loader whose arguments can be read and given again.

    Args:
        loader: The loader.
        number: Processes; 0 reads in this one.
        generator: What to draw from, in place of the loader's own.
    """
    other = copy.copy(loader)
    vars(other).update(num_workers=number, prefetch_factor=(loader.prefetch_factor or 2) if number else None)
    vars(other).update(generator=generator, timeout=0, persistent_workers=False, pin_memory=False, _iterator=None)
    return other
