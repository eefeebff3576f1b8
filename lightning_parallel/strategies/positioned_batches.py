"""The batches of a training loader, which notes what it has given, and can begin in the middle of an epoch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from lightning_parallel import _torch
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.strategies.read_order import (
    HOST,
    NoOrderError,
    WholeOrder,
    digest,
    generators_of,
    length_of,
    shares_of,
    source_of_all_ranks,
)

_MARKS = 64
"""Batches whose checksums are kept, beyond those that workers make ahead."""


@dataclass
class Start:
    """The place where an epoch begins.

    Args:
        epoch: The epoch.
        rest: What this rank reads; ``None`` for all.
        entry: What the checkpoint says of the loader.
    """

    epoch: int
    rest: Iterator[Any] | None = None
    entry: Mapping[str, Any] | None = None


@dataclass
class _Reading:
    start: Start
    random: RandomState
    generators: list[Tensor]
    marks: deque[tuple[int, int, int]] = field(default_factory=deque)


class _Pass(Iterator[Any]):
    """One pass over the batches, which is told apart from others that users make meanwhile."""

    def __init__(self, items: Callable[[_Pass], Iterator[Any]]) -> None:
        self.reading: _Reading | None = None
        self._items = items(self)

    def __next__(self) -> Any:
        return next(self._items)


class PositionedBatches(BatchSampler):
    """The items of a loader, batch by batch, or sample by sample where it makes no batches.

    Args:
        loader: The loader, with its sampler for this rank.
        start: Called when the loader is begun; where to begin it.
    """

    def __init__(self, loader: DataLoader[Any], start: Callable[[PositionedBatches], Start]) -> None:
        batches = loader.batch_sampler
        self.batches: Any = loader.sampler if batches is None else batches
        self.is_in_batches = batches is not None and type(batches) is not BatchSampler
        self.unit = "batches" if self.is_in_batches else "samples"
        self.makes_batches = type(batches) is BatchSampler
        if batches is not None:
            for name in ("sampler", "batch_size", "drop_last"):
                setattr(self, name, getattr(batches, name, None))
        self._start = start
        self._epochs: dict[int, int] = {}
        self._num_marks = _MARKS + loader.num_workers * (loader.prefetch_factor or 0)
        self.started: Start | None = None
        """The place where it was begun last; ``None`` before anything was asked of it."""
        self.skipped: dict[int, int | None] = {}
        """Epoch that was begun in its middle -> batches left out there; ``None`` where it began within a batch."""

    @classmethod
    def given_to(cls, loader: DataLoader[Any], start: Callable[[PositionedBatches], Start]) -> DataLoader[Any]:
        """A copy of `loader` that reads through one of these."""
        found = cls(loader, start)
        if loader.batch_sampler is None:
            return _torch.loaders.with_samples(loader, found)
        return _torch.loaders.with_batches(loader, found, loader.sampler)

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # while it is copied
            raise AttributeError(name)
        return getattr(self.batches, name)

    def __len__(self) -> int:
        return len(self.batches)

    @property
    def source(self) -> Any:
        """The sampler whose items are counted; the user's batch sampler where that makes the batches."""
        return self.batches.sampler if self.makes_batches else self.batches

    def _is_told(self, sampler: Any, epoch: int) -> bool:
        """Whether a hook has told a sampler an epoch of its own, as ``self.sampler.set_epoch(seed + epoch)`` does."""
        is_known = isinstance(sampler, DistributedSampler)
        return is_known and sampler.epoch not in (epoch, self._epochs.get(id(sampler), 0))

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self._items)

    def _items(self, this: _Pass) -> Iterator[Any]:
        """The batches of a pass, begun when the first one is asked for."""
        start = self._start(self)
        for each in (self.source, getattr(self.source, "sampler", None)):
            if callable(set_epoch := getattr(each, "set_epoch", None)) and not self._is_told(each, start.epoch):
                set_epoch(start.epoch)
                self._epochs[id(each)] = start.epoch
        own = generators_of(self.source, source_of_all_ranks(self.source, self.is_in_batches))
        reading = _Reading(start, RandomState.take(HOST), [each.get_state() for each in own])
        reading.marks = deque([(0, 0, 0)], maxlen=self._num_marks)
        this.reading, self.started = reading, start
        if start.entry is not None:
            self.skipped[start.epoch] = self._num_skipped(start.entry["consumed"])
        for batch in iter(self.batches) if start.rest is None else start.rest:
            items = batch if self.makes_batches else [batch]
            number, count, checksum = reading.marks[-1]
            reading.marks.append((number + 1, count + len(items), digest(items, checksum)))
            yield batch

    def _num_skipped(self, consumed: int) -> int | None:
        size = self.batch_size if self.makes_batches else 1
        number, rest = divmod(consumed, size * shares_of(self.source)[0])
        return None if rest else number

    def order(self, entry: Mapping[str, Any], epoch: int, data_ranks: tuple[int, int]) -> WholeOrder:
        """The order of an epoch that was begun in another run; raises as `WholeOrder` does."""
        if entry["unit"] != self.unit:
            raise NoOrderError(f"{entry['unit']} were counted, and it gives {self.unit} now")
        return WholeOrder(entry, epoch, self.source, data_ranks)

    @property
    def of_batch(self) -> dict[str, Any]:
        """The arguments of `WholeOrder.batches`."""
        size = self.batch_size if self.makes_batches else None
        return {"batch_size": size, "drop_last": bool(self.makes_batches and self.drop_last)}

    def entry(self, of_indices: object, num_batches: int) -> tuple[dict[str, Any], tuple[int, int]] | None:
        """The entry to save of it.

        Args:
            of_indices: A pass over it.
            num_batches: How many of the batches that it has given count as read.

        Returns:
            The entry without checksums; the place of this rank among those that share the order, and its checksum.
        """
        reading = of_indices.reading if isinstance(of_indices, _Pass) else None
        if reading is None:
            return None
        marks = {number: (count, checksum) for number, count, checksum in reading.marks}
        if num_batches not in marks:
            return None
        count, checksum = marks[num_batches]
        num_ranks, rank = shares_of(self.source)
        before = reading.start.entry
        start, parts = (0, []) if before is None else (before["consumed"], before["parts"])
        whole = source_of_all_ranks(self.source, self.is_in_batches)
        is_seeded = type(self.source) is DistributedSampler
        drawn_again = (
            before
            if before is not None
            else {
                "length": length_of(whole),
                "seed": getattr(self.source, "seed", None) if is_seeded or self.is_in_batches else None,
                "shuffle": self.source.shuffle if is_seeded else None,
                "drawn_by": type(whole).__name__,
                "random": None if is_seeded or type(whole) is SequentialSampler else reading.random.to_plain(),
                "generators": reading.generators,
            }
        )
        size = self.batch_size if self.makes_batches else None
        found = {
            "kind": "order",
            "unit": self.unit,
            **drawn_again,
            "consumed": start + count * num_ranks,
            "batch_size": size,
            "global_batch": None if size is None else size * num_ranks,
            "parts": [
                *parts,
                {"start": start, "items": count, "num_ranks": num_ranks},
            ],
        }
        return found, (rank, checksum)


def is_positionable(loader: object) -> bool:
    """Whether `loader` reads by indices, whose order can be drawn again."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, torch.utils.data.IterableDataset)


def batches_of(loader: object) -> PositionedBatches | None:
    """The batches that `loader` reads through, if it is one of these."""
    for name in ("batch_sampler", "sampler"):
        if isinstance(found := getattr(loader, name, None), PositionedBatches):
            return found
    return None
