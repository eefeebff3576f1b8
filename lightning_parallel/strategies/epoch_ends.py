"""Epochs of training that end on all ranks behind the same batch: where the first of them has no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup

from lightning_parallel import _lightning
from lightning_parallel.ranks.lock_step import said_by_all
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.loader_lengths import (
    ADVICE,
    empty_violations,
    has_exact_length,
    named,
    uneven_sharers,
)

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class EpochEnds:
    """Lets an epoch end on all ranks together, until `detach`.

    Where all loaders say how many batches they have, and can be trusted, ranks agree once and no step costs anything.
    Elsewhere they tell each other, before each batch, whether they have it.

    Args:
        trainer: The trainer, before its loaders are there.
        group: All ranks, for host memory.
        readers: Of each rank, its place among those that read different samples.
        refuse: Raises with violations, if there are any, which are the same on all ranks.

    Attributes:
        asks: Whether ranks tell each other before each batch, once the loaders are there.
    """

    def __init__(
        self,
        trainer: Trainer,
        group: ProcessGroup,
        readers: Sequence[int],
        refuse: Callable[[list[str]], None],
    ) -> None:
        self._trainer, self._group, self._readers, self._refuse = trainer, group, readers, refuse
        self._has_told = False
        self.asks = False
        _lightning.fetchers.set_loaders_ready(trainer, self._agree)

    def detach(self) -> None:
        """Give the trainer's loop back as it was."""
        _lightning.fetchers.set_loaders_ready(self._trainer, None)

    def _agree(self) -> None:
        """Agree on the length of epochs, or on asking each other. A collective."""
        loaders = _lightning.training_loaders(self._trainer)
        own = _lightning.fetchers.training_length(self._trainer)
        said = of_all_ranks((own, all(map(has_exact_length, loaders.flattened))))
        lengths = [length for length, _ in said]
        known = [length for length in lengths if length is not None]
        length = min(known) if len(known) == len(lengths) else None
        self._refuse(uneven_sharers(lengths, self._readers))
        if length is not None and len(set(lengths)) > 1:
            self._tell_lengths(known)
        if length != own:
            _lightning.fetchers.set_training_length(self._trainer, length)
        self.asks = not all(is_exact for _, is_exact in said)
        if not self.asks and length == own == max(known):
            return
        loader = _EqualEpochs(loaders, length, self._fetch if self.asks else None)
        has_first = _lightning.fetchers.read_training_through(self._trainer, loader, length)
        if length is None and not self._all_have(has_first, 0):
            _lightning.fetchers.leave_epoch(self._trainer)
        elif length is None:
            loader.num_read = 1

    def _fetch(self, batches: Iterator[Any], num_read: int) -> Any:
        """The next batch, if every rank has one. A collective.

        Args:
            batches: Of this rank.
            num_read: How many every rank has had in this epoch.

        Raises:
            StopIteration: On all ranks alike.
        """
        batch = next(batches, _NONE)
        if not self._all_have(batch is not _NONE, num_read):
            raise StopIteration
        return batch

    def _all_have(self, own: bool, num_read: int) -> bool:
        have = [bool(each) for each in said_by_all(int(own), self._group)]
        if all(have):
            return True
        if any(have):
            self._refuse(uneven_sharers(have, self._readers))
            if num_read == 0:
                self._refuse(empty_violations([not each for each in have], "of this epoch of training"))
            self._tell_end([rank for rank, has in enumerate(have) if not has], num_read)
        return False

    def _tell_lengths(self, lengths: Sequence[int]) -> None:
        least, most = min(lengths), max(lengths)
        first = named([rank for rank, length in enumerate(lengths) if length == least])
        self._tell(
            f"the loader of {first} has {least} training batches, that of {named([lengths.index(most)])} {most}: an "
            f"epoch ends on all ranks after {least}, and what is left is read by nobody. {ADVICE}"
        )

    def _tell_end(self, ended: Sequence[int], num_read: int) -> None:
        self._tell(
            f"after {num_read} training batches {named(ended)} {'has' if len(ended) == 1 else 'have'} none left, and "
            "other ranks have some: the epoch ends here on all ranks, as every other one will where the first of them "
            f"has no more, and what is left is read by nobody. {ADVICE}"
        )

    def _tell(self, words: str) -> None:
        if not self._has_told:
            rank_zero_warn(words)
        self._has_told = True


class _EqualEpochs:
    """The trainer's loaders as its fetcher reads them: as many batches on every rank.

    Args:
        loaders: Lightning's `CombinedLoader`, over which iteration begins anew in each epoch.
        length: Batches of an epoch; ``None`` where nobody knows.
        fetch: Reads the next batch, told how many have been read; ``None`` where ranks need not ask each other.
    """

    def __init__(self, loaders: Any, length: int | None, fetch: Callable[[Iterator[Any], int], Any] | None) -> None:
        self._loaders, self._length, self._fetch = loaders, length, fetch
        self.num_read = 0

    def __iter__(self) -> _EqualEpochs:
        iter(self._loaders)
        self.num_read = 0
        return self

    def __next__(self) -> Any:
        batch = next(self._loaders) if self._fetch is None else self._fetch(self._loaders, self.num_read)
        self.num_read += 1
        return batch

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("nobody knows the number of batches")
        return self._length

    def reset(self) -> None:
        """Let the loaders end their workers."""
        self._loaders.reset()


_NONE = object()
