"""Samplers that deal out samples to ranks in the order of one process, where Lightning's do not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from lightning_parallel import _lightning, _torch
from lightning_parallel.strategies.batches_of_rank import BatchesOfRank

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
        self._is_on = _lightning.deals_out_samples(trainer) and trainer.state.fn in _IN_ORDER
        if self._is_on:
            _lightning.set_deals_out_samples(trainer, False)

    def deal_out(self, loader: object) -> object:
        """The same loader with a sampler for this rank; what is no map-style loader comes back as it is."""
        is_ours = self._is_on and isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
        if not is_ours:
            return loader
        assert isinstance(loader, DataLoader)
        batches = loader.batch_sampler
        if any(_is_dealt_out(each) for each in (loader.sampler, batches, getattr(batches, "sampler", None))):
            return loader
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
        of_rank = BatchesOfRank(batches, **ranks, seed=seed, is_same=self._is_same, repeats=not self._evaluates)
        number = sized_len(batches)
        if number is not None and (of_rank.repeats or number < of_rank.num_replicas):
            self._tell_repeated("batches", number, of_rank.num_replicas, len(of_rank))
        return _torch.loaders.with_batches(loader, of_rank, of_rank)

    @property
    def _evaluates(self) -> bool:
        return self._trainer.sanity_checking or self._trainer.validating or self._trainer.testing

    def _sampler_of_rank(self, loader: DataLoader[Any], *, drop_last: bool) -> Any:
        """The sampler of this rank; in evaluation, one that reads no sample twice.

        Args:
            loader: A loader of a map-style data set.
            drop_last: Whether batches that are not full are left out.
        """
        ranks = self._trainer.distributed_sampler_kwargs or {}
        overfit = self._trainer.overfit_batches  # type: ignore[attr-defined]
        sampler = _lightning.sampler_of_rank(loader, overfit_batches=overfit, **ranks)
        if self._evaluates and len(sampler.dataset) >= sampler.num_replicas:
            _leave_out_repeated(sampler, drop_last=drop_last)
        if sampler.total_size > len(sampler.dataset):
            self._tell_repeated("samples", len(sampler.dataset), sampler.num_replicas, sampler.num_samples)
        return sampler

    def _tell_repeated(self, what: str, number: int, num_ranks: int, of_each: int) -> None:
        """Say once how many are read twice, where ranks get as many each: metrics and losses count them twice.

        Args:
            what: ``"samples"`` or ``"batches"``.
            number: How many there are.
            num_ranks: Ranks that read different ones.
            of_each: How many each of them reads.
        """
        repeated = of_each * num_ranks - number
        if repeated > 0 and (number, num_ranks) not in self._told:
            self._told.add((number, num_ranks))
            rank_zero_info(
                f"{number} {what} are dealt out to {num_ranks} ranks, {of_each} to each: {repeated} more than there "
                f"are, and these count twice in losses and metrics. A number of {what} that {num_ranks} divides avoids "
                "it"
            )

    def _is_same(self, value: object) -> bool:
        """Whether all ranks give it the same. A collective."""
        strategy = self._trainer.strategy
        return strategy.reduce_boolean_decision(bool(strategy.broadcast(value) == value))

    def detach(self) -> None:
        """Give the trainer its setting back."""
        if self._is_on:
            _lightning.set_deals_out_samples(self._trainer, True)
        self._is_on = False


def _is_dealt_out(sampler: object) -> bool:
    """Whether the user's sampler knows of ranks by itself."""
    return isinstance(sampler, DistributedSampler) or hasattr(sampler, "num_replicas")


def _leave_out_repeated(sampler: DistributedSampler[Any], *, drop_last: bool) -> None:
    """Let `sampler` read each sample once: some ranks have one more than others, or none has, with `drop_last`.

    With `drop_last`, each rank's full batches are then those of one process with the global batch size.
    """
    num_samples, num_ranks = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    sampler.drop_last = drop_last
    sampler.total_size = num_samples - num_samples % num_ranks if drop_last else num_samples
    sampler.num_samples = len(range(sampler.rank, sampler.total_size, num_ranks))
