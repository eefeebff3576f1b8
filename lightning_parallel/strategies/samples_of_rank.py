"""Samples of a data set, dealt out to ranks: as many to each, or each of them once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DistributedSampler, Sampler


class SamplesOfRank(Sampler[Any]):
    """Every ``num_replicas``-th sample of a data set, from the ``rank``-th on.

    In evaluation each sample is read once: some ranks have one more than others, or none has with `drop_last`, whose
    full batches are then those of one process with the global batch size.

    Args:
        even: Gives every rank as many, and repeats samples where they do not come out even.
        drop_last: Whether batches that are not full are left out.
        repeats: Asked when it is read: whether every rank needs as many.
        tell: Takes the number of samples that are read twice, when it is read.

    Example:
        >>> DataLoader(data, batch_size=4, sampler=SamplesOfRank(DistributedSampler(data), False, lambda: False, print))
    """

    def __init__(
        self,
        even: DistributedSampler[Any],
        drop_last: bool,
        repeats: Callable[[], bool],
        tell: Callable[[int], object],
    ) -> None:
        self._even, self._once, self._repeats, self._tell = even, copy.copy(even), repeats, tell
        number: int = len(even.dataset)  # type: ignore[arg-type]
        self._once.drop_last = drop_last
        self._once.total_size = number - number % even.num_replicas if drop_last else number
        self._once.num_samples = len(range(even.rank, self._once.total_size, even.num_replicas))
        self.num_replicas = even.num_replicas
        """The number of ranks that read different samples."""

    @property
    def _now(self) -> DistributedSampler[Any]:
        # Each rank needs a batch.
        has_few = len(self._even.dataset) < self.num_replicas  # type: ignore[arg-type]
        return self._even if has_few or self._repeats() else self._once

    def set_epoch(self, epoch: int) -> None:
        """Tell it which epoch begins."""
        self._even.set_epoch(epoch)
        self._once.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._now)

    def __iter__(self) -> Iterator[Any]:
        now = self._now
        self._tell(max(0, now.total_size - len(now.dataset)))  # type: ignore[arg-type]
        return iter(now)
