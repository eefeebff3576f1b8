"""Lengths of loaders: whether they can be trusted, and what ranks cannot have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from lightning.fabric.utilities.data import has_iterable_dataset
from torch.utils.data import DataLoader

from lightning_parallel import _lightning
from lightning_parallel.strategies.batches_of_rank import BatchesOfRank
from lightning_parallel.strategies.positioned_batches import batches_of

_EXACT = ("torch", "torchdata", "lightning", "lightning_parallel")
"""Packages whose loaders and samplers give as many batches as they say."""
ADVICE = (
    "Give every rank as many: a data set with a length, whose samples are dealt out, or an IterableDataset that gives "
    "each rank an equal share (drop what is over, as drop_last=True and DistributedSampler(drop_last=True) do)"
)


def has_exact_length(loader: object) -> bool:
    """Whether `loader` gives as many batches as its length says: what the user wrote may give fewer, or more.

    Args:
        loader: A loader that Lightning has prepared.
    """
    if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
        return False
    cls = type(loader)
    is_own = cls.__iter__ is not DataLoader.__iter__ or cls.__len__ is not DataLoader.__len__
    positioned = batches_of(loader)
    batches = _lightning.fetchers.own_batch_sampler(loader.batch_sampler if positioned is None else positioned.batches)
    if isinstance(batches, BatchesOfRank) and not batches.repeats:
        # Where none is read again, ranks have as many as the user's sampler gives them.
        batches = batches.batch_sampler
    samplers = (batches, getattr(batches, "sampler", None), loader.sampler)
    return not (is_own and _package(loader) not in _EXACT) and all(
        _package(each) in _EXACT for each in samplers if each is not None
    )


def length_violations(lengths: Sequence[int | None]) -> list[str]:
    """Reasons why ranks cannot read a loader together.

    Args:
        lengths: The number of batches that the loader of each rank says it has; ``None`` where it has no length.
    """
    without = [rank for rank, length in enumerate(lengths) if length is None]
    if without and len(without) < len(lengths):
        return [
            f"the loaders of {named(without)} have no length and those of other ranks have one: give all ranks loaders "
            "of one kind"
        ]
    return [] if without else empty_violations([length == 0 for length in lengths], "of a loader")


def empty_violations(are_empty: Sequence[bool], what: str) -> list[str]:
    """The reason why ranks cannot go on where some of them, not all, have no batch.

    Args:
        are_empty: Of each rank, whether it has none.
        what: Of which batches, such as ``"of training"``.
    """
    if all(are_empty) or not any(are_empty):
        return []
    empty = [rank for rank, is_empty in enumerate(are_empty) if is_empty]
    return [
        f"{named(empty)} {'has' if len(empty) == 1 else 'have'} no batch {what}, where other ranks have some. {ADVICE}"
    ]


def uneven_sharers(values: Sequence[object], readers: Sequence[int]) -> list[str]:
    """The reason why ranks that share samples cannot go on where they have read different numbers of batches.

    Args:
        values: Of each rank, what has to be equal where ranks read the same samples.
        readers: Of each rank, its place among those that read different samples.
    """
    return [
        f"ranks {one} and {other} compute the same samples together, and their loaders have different numbers of "
        "batches: give both the same samples. trainer.distributed_sampler_kwargs says which rank is to read what; the "
        "number of a rank does not"
        for one, other in _differing_sharers(values, readers)
    ]


def unequal_sharers(found: Sequence[object], readers: Sequence[int], of: str) -> list[str]:
    """The reason why ranks that share samples cannot go on where they have read different ones.

    Args:
        found: Of each rank, what it has read.
        readers: Of each rank, its place among those that read different samples.
        of: What the batch is for, such as ``"validate, loader 0"``.
    """
    return [
        f"ranks {one} and {other} compute the same samples together, and have read different ones as their first batch "
        f"({of}): a data set that deals out samples by the number of a rank has to do it by "
        "trainer.distributed_sampler_kwargs, and one that draws them, or changes them at random, needs "
        "seed_everything(seed, workers=True)"
        for one, other in _differing_sharers(found, readers)
    ]


def equal_readers(found: Sequence[object], readers: Sequence[int]) -> str:
    """The warning where ranks that are to read different samples have read the same ones; empty if none have.

    Args:
        found: Of each rank, what it has read; empty if nobody can say.
        readers: Of each rank, its place among those that read different samples.
    """
    first = {reader: rank for rank, reader in reversed(list(enumerate(readers)))}
    for one, other in itertools.combinations(sorted(first.values()), 2):
        if found[one] and found[one] == found[other]:
            return (
                f"ranks {one} and {other} have read the same samples as their first batch of training, which nothing "
                "has dealt out: each of them is trained on more than once, and an epoch is as long as on one device. "
                "Give each rank its share, by num_replicas and rank of trainer.distributed_sampler_kwargs; the workers "
                "of an IterableDataset divide that by torch.utils.data.get_worker_info()"
            )
    return ""


def _differing_sharers(values: Sequence[object], readers: Sequence[int]) -> list[tuple[int, int]]:
    """The first pair of ranks that share samples and have different values, if there is one."""
    first: dict[int, int] = {}
    pairs = [(first.setdefault(reader, rank), rank) for rank, reader in enumerate(readers)]
    return [(one, other) for one, other in pairs if values[one] != values[other]][:1]


def named(ranks: Sequence[int]) -> str:
    """Ranks in words, such as ``"ranks 1, 3"``."""
    some = ", ".join(map(str, ranks[:8])) + (" and others" if len(ranks) > 8 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {some}"


def _package(value: object) -> str:
    return type(value).__module__.partition(".")[0]
