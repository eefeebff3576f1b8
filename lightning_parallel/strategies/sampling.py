"""Samplers that deal out samples to ranks in the order of one process, where Lightning's do not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_parallel import _lightning

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class SampleDealer:
    """Gives each rank its samples in training, in the order in which one process would read them.

    Lightning shuffles every training set that it deals out, also one whose loader does not shuffle. Dealt out in
    order, batch ``i`` of all ranks together is batch ``i`` of one process with the global batch size.

    Args:
        trainer: Its `use_distributed_sampler` is honoured, and set back by `detach`.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._is_on = _lightning.deals_out_samples(trainer) and trainer.state.fn == TrainerFn.FITTING
        if self._is_on:
            _lightning.set_deals_out_samples(trainer, False)

    def deal_out(self, loader: object) -> object:
        """The same loader with a sampler for this rank; what is no map-style loader comes back as it is."""
        is_ours = self._is_on and isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
        if not is_ours or isinstance(loader.sampler, DistributedSampler):  # type: ignore[attr-defined]
            return loader
        assert isinstance(loader, DataLoader)
        return _lightning.with_sampler_of_rank(
            loader,
            overfit_batches=self._trainer.overfit_batches,  # type: ignore[attr-defined]
            **(self._trainer.distributed_sampler_kwargs or {}),
        )

    def detach(self) -> None:
        """Give the trainer its setting back."""
        if self._is_on:
            _lightning.set_deals_out_samples(self._trainer, True)
        self._is_on = False
