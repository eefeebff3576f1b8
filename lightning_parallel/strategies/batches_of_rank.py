"""Batches of a user's batch sampler, dealt out to ranks as they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.random_streams import seed_generators, seed_of_part, unchanged_generators

_HOST = torch.device("cpu")


class BatchesOfRank:
    """Every ``num_replicas``-th batch of a batch sampler, from the ``rank``-th on.

    In training every rank has as many batches: where they do not come out even, the first ones follow the last ones, as
    the samples of `DistributedSampler` do. In evaluation none is read twice, if there is one for each rank.

    Args:
        batches: The user's batch sampler, the same on every rank.
        num_replicas: How many ranks read different samples.
        rank: This one among them.
        seed: What the batch sampler draws from, together with the number of the epoch: ranks have to draw alike.
        is_same: Whether all ranks give it the same. A collective.
        repeats: Asked when it is read: whether every rank needs as many.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        num_replicas: int,
        rank: int,
        seed: int,
        is_same: Callable[[Any], bool],
        repeats: Callable[[], bool] = lambda: True,
    ) -> None:
        self.batch_sampler = batches
        self.num_replicas, self.rank = num_replicas, rank
        self.seed, self._repeats, self._is_same = seed, repeats, is_same
        self._epoch = 0

    @property
    def repeats(self) -> bool:
        """Whether it gives every rank as many, however many there are."""
        return self._repeats()

    @property
    def repeated(self) -> int:
        """The number of batches that are read twice."""
        number: int = len(self.batch_sampler)  # type: ignore[arg-type]
        return -number % self.num_replicas if self.repeats or number < self.num_replicas else 0

    @property
    def sampler(self) -> BatchesOfRank:
        """Itself: what Lightning looks for to tell it the number of an epoch."""
        return self

    @property
    def batch_size(self) -> int | None:
        """Samples in a batch, if the user's batch sampler says so."""
        return getattr(self.batch_sampler, "batch_size", None)

    def set_epoch(self, epoch: int) -> None:
        """Tell it, and the user's batch sampler, which epoch begins."""
        self._epoch = epoch
        for each in (self.batch_sampler, getattr(self.batch_sampler, "sampler", None)):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)

    def __len__(self) -> int:
        number: int = len(self.batch_sampler)  # type: ignore[arg-type]
        first = 0 if self.repeats or number < self.num_replicas else self.rank
        return len(range(first, number, self.num_replicas))

    def __iter__(self) -> Iterator[Any]:
        batches = self.of_all_ranks()
        first = list(itertools.islice(batches, self.num_replicas))
        self._check(first)
        if not first:
            return
        repeats = self.repeats or len(first) < self.num_replicas
        batches = itertools.chain(first, batches)
        while turn := list(itertools.islice(batches, self.num_replicas)):
            if repeats:
                turn += itertools.islice(itertools.cycle(first), self.num_replicas - len(turn))
            yield from turn[self.rank : self.rank + 1]

    def of_all_ranks(self) -> Iterator[Any]:
        """The batches of all ranks, with generators that are the same on every rank and change no others."""
        with unchanged_generators(_HOST):
            seed_generators(seed_of_part(self.seed, self._epoch))
            batches = iter(self.batch_sampler)
            found = list(itertools.islice(batches, 1))
            seed = int(torch.randint(2**62, ()))
        for number in itertools.count():
            if not found:
                return
            yield found[0]
            with unchanged_generators(_HOST):
                seed_generators(seed_of_part(seed, number))
                found = list(itertools.islice(batches, 1))

    def _check(self, first: list[Any]) -> None:
        if not self._is_same(first):
            raise ConfigurationError([_DIFFERENT.format(type(self.batch_sampler).__name__, first[:1])])


_DIFFERENT = (
    "the batch sampler {} has other batches on other ranks, and begins with {} here, so ranks would read some samples "
    "twice and others never: seed its generator alike on every rank, or draw from torch's or Python's default "
    "generator. If it deals out batches to ranks by itself, give Trainer(use_distributed_sampler=False)"
)
