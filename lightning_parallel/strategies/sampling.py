"""Which rank reads what, where Lightning's own answer is not that of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.fabric.utilities.data import has_iterable_dataset
from lightning.pytorch.trainer.connectors.data_connector import _get_distributed_sampler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import _is_dataloader_shuffled, _update_dataloader
from torch.utils.data import DataLoader, DistributedSampler

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
        self._connector = trainer._accelerator_connector
        self._is_on = self._connector.use_distributed_sampler and trainer.state.fn == TrainerFn.FITTING
        if self._is_on:
            self._connector.use_distributed_sampler = False

    def deal_out(self, loader: object) -> object:
        """The same loader with a sampler for this rank; what is no map-style loader comes back as it is."""
        is_ours = self._is_on and isinstance(loader, DataLoader) and not has_iterable_dataset(loader)
        if not is_ours or isinstance(loader.sampler, DistributedSampler):  # type: ignore[attr-defined]
            return loader
        assert isinstance(loader, DataLoader)
        sampler = _get_distributed_sampler(
            loader,
            _is_dataloader_shuffled(loader),
            overfit_batches=self._trainer.overfit_batches,  # type: ignore[attr-defined]
            **(self._trainer.distributed_sampler_kwargs or {}),
        )
        return _update_dataloader(loader, sampler)

    def detach(self) -> None:
        """Give the trainer its setting back."""
        if self._is_on:
            self._connector.use_distributed_sampler = True
        self._is_on = False
