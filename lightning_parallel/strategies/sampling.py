"""Samplers that deal out samples to ranks in the order of one process, where Lightning's do not."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_parallel import _lightning, _torch
from lightning_parallel.strategies.batches_of_rank import BatchesOfRank
from lightning_parallel.strategies.samples_of_rank import SamplesOfRank

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_IN_ORDER = (TrainerFn.FITTING, TrainerFn.VALIDATING, TrainerFn.TESTING)
"""Where samples are dealt out here. In prediction, Lightning repeats none, and remembers which a batch has."""


class SampleDealer:
    """Gives each rank its samples, in the order in which one process would read them.

    Lightning shuffles every training set that it deals out, also one whose loader does not shuffle, and makes batches
    of one sample where a loader has a batch sampler. Dealt out in order, batch ``i`` of all ranks together is batch
    ``i`` of one process with the global batch size. In training, every rank has as many samples, and some are read
    twice where they do not come out even. In evaluation none is, so that metrics are those of one process.

    Args:
        trainer: Its `use_distributed_sampler` is honoured, and set back by `detach`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._told: set[tuple[int, int]] = set()
        self._before: list[tuple[DistributedSampler[Any], dict[str, Any]]] = []
        self._is_on = _lightning.deals_out_samples(trainer) and trainer.state.fn in _IN_ORDER
        if self._is_on:
            _lightning.set_deals_out_samples(trainer, False)

    def deal_out(self, loader: object) -> object:
        """The same loader with a sampler for this rank; what is no map-style loader comes back as it is."""
        if not isinstance(loader, DataLoader) or has_iterable_dataset(loader):
            return loader
        if is_dealt_out(loader):
            self._deal_to_readers(loader)
            return loader
        if not self._is_on:
            return loader
        batches = loader.batch_sampler
        if loader.batch_size is not None or batches is None:
            return _lightning.with_sampler(loader, self._sampler_of_rank(loader, drop_last=loader.drop_last))
        if type(batches) is BatchSampler:
            # Samples are dealt out as where the loader is given the sampler and the batch size.
            plain: DataLoader[Any] = DataLoader(loader.dataset, sampler=batches.sampler)
            sampler = self._sampler_of_rank(plain, drop_last=batches.drop_last)
            return _torch.loaders.with_batches(
                loader, BatchSampler(sampler, batches.batch_size, batches.drop_last), sampler
            )
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as Lightning's samplers
        ranks = self._trainer.distributed_sampler_kwargs or {}
        of_rank = BatchesOfRank(batches, **ranks, seed=seed, is_same=self._is_same, repeats=self._repeats())
        number = sized_len(batches)
        if number is not None:
            self._tell_repeated("batches", number, of_rank.num_replicas, of_rank.repeated)
        return _torch.loaders.with_batches(loader, of_rank, of_rank)

    def _deal_to_readers(self, loader: DataLoader[Any]) -> None:
        """Let the user's own sampler for all ranks deal out to those that read different samples, until `detach`.

        In place: the user may tell the very object which epoch begins, and a batch sampler may have taken it.
        """
        ranks = self._trainer.distributed_sampler_kwargs or {}
        num_ranks, rank = self._trainer.world_size, self._trainer.global_rank
        num_readers = ranks.get("num_replicas", num_ranks)
        samplers: tuple[Any, ...] = loader.sampler, getattr(loader.batch_sampler, "sampler", None)
        for own in samplers if num_readers != num_ranks else ():
            # What the user has dealt out in another way, to the ranks of a node, say, is not to be guessed at.
            if type(own) is DistributedSampler and (own.num_replicas, own.rank) == (num_ranks, rank):
                of_readers: DistributedSampler[Any] = DistributedSampler(own.dataset, **ranks, drop_last=own.drop_last)
                changed = ("num_replicas", "rank", "num_samples", "total_size")
                self._before.append((own, {name: getattr(own, name) for name in changed}))
                vars(own).update({name: getattr(of_readers, name) for name in changed})
                self._tell_readers(num_ranks, num_readers)

    def _tell_readers(self, num_ranks: int, num_readers: int) -> None:
        """Say once that the user's own sampler deals out to fewer than all ranks."""
        if (num_ranks, num_readers) not in self._told:
            self._told.add((num_ranks, num_readers))
            whom = "1 reader" if num_readers == 1 else f"{num_readers} readers"
            rank_zero_info(
                f"a DistributedSampler for {num_ranks} ranks deals out its samples to {whom}: the other ranks compute "
                "the same samples together with these (trainer.distributed_sampler_kwargs)"
            )

    def _repeats(self) -> Callable[[], bool]:
        """Answers whether every rank has to have as many: not where it evaluates, one loader after the other.

        Loaders that are read together give a batch of each, and ``None`` for those that have come to an end. Ranks
        would not have the same, and could not run each other's steps.
        """
        trainer = self._trainer
        if not (trainer.sanity_checking or trainer.validating or trainer.testing):
            return lambda: True
        return functools.partial(_lightning.fetchers.reads_together, _lightning.fetchers.evaluation_loop(trainer))

    def _sampler_of_rank(self, loader: DataLoader[Any], *, drop_last: bool) -> Any:
        """The sampler of this rank.

        Args:
            loader: A loader of a map-style data set.
            drop_last: Whether batches that are not full are left out.
        """
        ranks = self._trainer.distributed_sampler_kwargs or {}
        if _shuffles_by_state(loader.sampler):
            loader = DataLoader(loader.dataset, shuffle=True)
        overfit = self._trainer.overfit_batches  # type: ignore[attr-defined]
        even = _lightning.sampler_of_rank(loader, overfit_batches=overfit, **ranks)
        repeats, number = self._repeats(), len(even.dataset)
        tell = functools.partial(self._tell_repeated, "samples", number, even.num_replicas)
        if not repeats():
            return SamplesOfRank(even, drop_last, repeats, tell)
        tell(even.total_size - number)
        return even

    def _tell_repeated(self, what: str, number: int, num_ranks: int, repeated: int) -> None:
        """Say once how many are read twice, where ranks get as many each: metrics and losses count them twice.

        Args:
            what: ``"samples"`` or ``"batches"``.
            number: How many there are.
            num_ranks: Ranks that read different ones.
            repeated: How many of them are read twice.
        """
        if repeated > 0 and (number, num_ranks) not in self._told:
            self._told.add((number, num_ranks))
            rank_zero_info(
                f"{number} {what} are dealt out to {num_ranks} ranks, {(number + repeated) // num_ranks} to each: "
                f"{repeated} more than there are, and these count twice in losses and metrics. A number of {what} that "
                f"{num_ranks} divides avoids it"
            )

    def _is_same(self, value: object) -> bool:
        """Whether all ranks give it the same. A collective."""
        strategy = self._trainer.strategy
        return strategy.reduce_boolean_decision(bool(strategy.broadcast(value) == value))

    def detach(self) -> None:
        """Give the trainer its setting back, and samplers of the user's what they had."""
        for sampler, before in self._before:
            vars(sampler).update(before)
        self._before.clear()
        if self._is_on:
            _lightning.set_deals_out_samples(self._trainer, True)
        self._is_on = False


def _shuffles_by_state(sampler: Any) -> bool:
    """Whether it is what torchdata's `StatefulDataLoader` has in place of torch's own sampler for ``shuffle=True``.

    Its order follows from a generator that the loader saves where it is given no other sampler, and not behind one for
    ranks: those are given the order of a seed and an epoch, as with torch's.
    """
    is_theirs = type(sampler).__module__.startswith("torchdata.") and type(sampler).__name__ == "RandomSampler"
    return is_theirs and not sampler.replacement and sampler.num_samples == len(sampler.data_source)


def are_dealt_out(loaders: CombinedLoader | None) -> bool:
    """Whether samplers of all loaders give each rank its share, as far as can be seen.

    Args:
        loaders: Those of training, ``None`` before there are any.
    """
    found = [] if loaders is None else loaders.flattened
    return all(isinstance(each, DataLoader) and not has_iterable_dataset(each) and is_dealt_out(each) for each in found)


def is_dealt_out(loader: DataLoader[Any]) -> bool:
    """Whether a sampler of the loader gives each rank its share.

    Args:
        loader: A loader of a map-style data set.
    """
    batches = loader.batch_sampler
    samplers = loader.sampler, batches, getattr(batches, "sampler", None)
    return any(isinstance(each, DistributedSampler) or hasattr(each, "num_replicas") for each in samplers)
