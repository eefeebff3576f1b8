"""Samplers that deal out samples to ranks in the order of one process, where Lightning's do not."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import has_iterable_dataset
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
    ``i`` of one process with the global batch size.

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
        ranks = self._trainer.distributed_sampler_kwargs or {}
        overfit = self._trainer.overfit_batches  # type: ignore[attr-defined]
        if loader.batch_size is not None or batches is None:
            dealt: Any = _lightning.with_sampler_of_rank(loader, overfit_batches=overfit, **ranks)
            self._tell_repeated(dealt.sampler)
            return dealt
        if type(batches) is BatchSampler:
            # Samples are dealt out as where the loader is given the sampler and the batch size.
            plain: DataLoader[Any] = DataLoader(loader.dataset, sampler=batches.sampler)
            sampler = _lightning.sampler_of_rank(plain, overfit_batches=overfit, **ranks)
            self._tell_repeated(sampler)
            return _torch.loaders.with_batches(
                loader, BatchSampler(sampler, batches.batch_size, batches.drop_last), sampler
            )
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as Lightning's samplers
        of_rank = BatchesOfRank(batches, **ranks, seed=seed, is_same=self._is_same)
        return _torch.loaders.with_batches(loader, of_rank, of_rank)

    def _tell_repeated(self, sampler: object) -> None:
        """Say how many samples are read twice, since ranks get as many each: metrics count them twice."""
        if not isinstance(sampler, DistributedSampler):
            return
        num_samples = len(sampler.dataset)  # type: ignore[arg-type]
        numbers = num_samples, sampler.num_replicas
        repeated = sampler.total_size - num_samples
        if repeated > 0 and numbers not in self._told:
            self._told.add(numbers)
            rank_zero_info(
                f"{num_samples} samples are dealt out to {sampler.num_replicas} ranks, {sampler.num_samples} to each: "
                f"{repeated} more than there are, and these count twice in losses and metrics. A number "
                f"of samples that {sampler.num_replicas} divides avoids it, as does one device alone for the last test"
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
