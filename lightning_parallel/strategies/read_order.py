"""The order of an epoch, drawn again from what a checkpoint says of it, and its rest, dealt out to ranks."""

from __future__ import annotations

import copy
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_parallel import _lightning
from lightning_parallel.ranks.random_streams import RandomState, unchanged_generators
from lightning_parallel.strategies.batches_of_rank import BatchesOfRank

HOST = torch.device("cpu")


class NoOrderError(Exception):
    """The order cannot be drawn again; the message is the reason."""


def digest(items: Iterable[Any], before: int = 0) -> int:
    """The checksum of `items`, added to that of those before them."""
    return zlib.crc32("".join(f"{item!r}," for item in items).encode(), before)


def shares_of(source: Any) -> tuple[int, int]:
    """Number of ranks that share the order of a sampler, and which of them this one is."""
    return int(getattr(source, "num_replicas", 1)), int(getattr(source, "rank", 0))


def source_of_all_ranks(source: Any, is_in_batches: bool) -> Any:
    """The giver of the items of all ranks in one order: samples, or batches where the user's sampler makes them."""
    if isinstance(source, BatchesOfRank):
        return source.batch_sampler
    if isinstance(source, _lightning.epochs.SamplerWrapper):
        return _lightning.epochs.inner_sampler(source)
    if is_in_batches or not isinstance(source, DistributedSampler):
        return source
    one = copy.copy(source)
    one.num_replicas, one.rank = 1, 0
    one.num_samples = one.total_size = len(source.dataset)  # type: ignore[arg-type]
    return one


def length_of(source: Any) -> int | None:
    """Number of items, ``None`` where the sampler does not say."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None


def generators_of(*sources: Any) -> list[torch.Generator]:
    """The generators that samplers have of their own."""
    found = [getattr(source, "generator", None) for source in sources]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


class WholeOrder:
    """The order of an epoch over all ranks, from its first item on.

    Args:
        entry: What the checkpoint says of the loader.
        epoch: The epoch.
        source: The sampler, or batch sampler, of this run's loader.
        data_ranks: How many ranks read different samples, and which of them this one is.

    Raises:
        NoOrderError: If it is another one, as far as it was read.
    """

    def __init__(self, entry: Mapping[str, Any], epoch: int, source: Any, data_ranks: tuple[int, int]) -> None:
        self._entry = entry
        self._num_ranks, self._rank = shares_of(source)
        self._consumed = int(entry["consumed"])
        drawn = self._source(source, epoch)
        own, length = generators_of(source, drawn), length_of(source_of_all_ranks(source, entry["unit"] == "batches"))
        if length != entry["length"]:
            raise NoOrderError(f"it has {length} {entry['unit']} in place of {entry['length']}")
        with unchanged_generators(HOST):
            if entry["random"] is not None:
                RandomState.from_plain(entry["random"]).restore(HOST)
            for generator, state in zip(own, entry["generators"], strict=False):
                generator.set_state(state)
            items = source.of_all_ranks() if isinstance(source, BatchesOfRank) else iter(drawn)
            # One more than was read, since some samplers draw when they are asked first.
            taken = list(itertools.islice(items, max(self._consumed, self._num_ranks) + 1))
        self._first, self._items = taken[: self._num_ranks], itertools.chain(taken[self._consumed :], items)
        self._check(taken, data_ranks)

    def _source(self, source: Any, epoch: int) -> Any:
        entry = self._entry
        if isinstance(source, BatchesOfRank):
            found: Any = source.batch_sampler
            source.seed = source.seed if entry["seed"] is None else entry["seed"]
        elif entry["seed"] is not None:
            found = DistributedSampler(range(entry["length"]), 1, 0, entry["shuffle"], entry["seed"])  # type: ignore[arg-type]
        elif type(source) is DistributedSampler and entry["drawn_by"] == RandomSampler.__name__:
            generator = torch.Generator() if entry["generators"] else None
            found = RandomSampler(range(entry["length"]), generator=generator)
        elif type(source) is DistributedSampler and entry["drawn_by"] == SequentialSampler.__name__:
            found = SequentialSampler(range(entry["length"]))
        else:
            found = source_of_all_ranks(source, entry["unit"] == "batches")
        for each in (source, found):
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(epoch)
        return found

    def _check(self, taken: Sequence[Any], data_ranks: tuple[int, int]) -> None:
        """Compare the checksums of what each rank of earlier runs had read."""
        for part in self._entry["parts"]:
            num_ranks, start, saved = part["num_ranks"], part["start"], part["digests"]
            size = part["items"] * num_ranks
            slab = list(itertools.islice(itertools.chain(taken[start:], itertools.cycle(taken[:num_ranks])), size))
            found = [digest(slab[rank::num_ranks]) for rank in range(num_ranks)]
            if num_ranks == 1 and len(saved) > 1:
                if len(set(saved)) > 1 and len(saved) != data_ranks[0]:
                    raise NoOrderError("each rank had an order of its own, and there are other ranks now")
                saved = [saved[data_ranks[1] % len(saved)]]
            if found != saved:
                raise NoOrderError("its sampler gives another order than in the run that was saved")

    def batches(self, source: Any, *, batch_size: int | None, drop_last: bool) -> Iterator[Any]:
        """The rest that this rank reads.

        Args:
            source: As above.
            batch_size: Samples of a batch; ``None`` where items are given as they are.
            drop_last: Whether a last batch that is not full is left out.
        """
        rest = self._dealt(bool(getattr(source, "drop_last", False)))
        return rest if batch_size is None else iter(BatchSampler(rest, batch_size, drop_last))  # type: ignore[arg-type]

    def _dealt(self, drop_last: bool) -> Iterator[Any]:
        """Every rank takes its turn; where the rest does not come out even, the first ones follow, as in any epoch."""
        again = itertools.cycle(self._first)
        while turn := list(itertools.islice(self._items, self._num_ranks)):
            if len(turn) < self._num_ranks:
                if drop_last:
                    return
                turn += itertools.islice(again, self._num_ranks - len(turn))
            yield turn[self._rank]

    def num_batches(self, source: Any, *, batch_size: int | None, drop_last: bool) -> int | None:
        """Number of `batches` that are left; the arguments are the same."""
        if self._entry["length"] is None:
            return None
        left = max(0, self._entry["length"] - self._consumed)
        of_rank = _parts(left, self._num_ranks, bool(getattr(source, "drop_last", False)))
        return of_rank if batch_size is None else _parts(of_rank, batch_size, drop_last)


def _parts(number: int, size: int, drop_last: bool) -> int:
    return number // size if drop_last else -(-number // size)
