"""Strategies whose checkpoints say how much of an epoch has been read, and whose fits go on from there."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.strategies.data_position import DataPosition
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.strategies.signalled_strategy import SignalledStrategy


class PositionedStrategy(SignalledStrategy):
    """Reads every sample of an epoch once, also where another run has begun it.

    Args:
        saving: How checkpoints are written, and how a run ends.
    """

    def __init__(self, saving: Saving) -> None:
        super().__init__(saving)
        self._position = DataPosition(self)

    @property
    def data_ranks(self) -> tuple[int, int]:
        """Number of ranks that read different samples, and which of them this one is."""
        return 1, 0

    def deal_out(self, dataloader: object) -> object:
        """The loader as this rank reads it."""
        return dataloader

    @override
    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.module.trainer
        dealt = self.deal_out(dataloader)
        return self._position.read_through(dealt, trainer, is_dealt=dealt is not dataloader)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        module = self.lightning_module
        trainer = None if module is None else _lightning.attached_trainer(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._position.add_to(checkpoint, trainer)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        module = self.lightning_module
        trainer = None if module is None else _lightning.attached_trainer(module)
        if trainer is not None and trainer.state.fn == TrainerFn.FITTING:
            self._position.take_from(checkpoint)
        return checkpoint

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self._position.begin(self.module.trainer)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self._position.release()

    @override
    def teardown(self) -> None:
        self._position.end()
        super().teardown()
