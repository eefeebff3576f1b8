"""Strategies whose checkpoints are those of one process: whole values, and the random states of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.full_state import (
    load_whole_optimizer_state,
    load_whole_state_dict,
    whole_optimizer_state,
    whole_state_dict,
)
from lightning_parallel.policies import Policies
from lightning_parallel.strategies.optimizers import tell_missing_states
from lightning_parallel.strategies.planned_strategy import PlannedStrategy
from lightning_parallel.strategies.precision import widen
from lightning_parallel.strategies.saving_strategy import Endings
from lightning_parallel.strategies.streams import RandomStreams

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class WholeCheckpointsStrategy(PlannedStrategy):
    """Saves whole values from rank 0, and loads them on every rank, also before a fit.

    Args:
        policies: The rules, without those that depend on the module.
        check: Whether the first step is compared with one process.
        endings: What ends a run, and how.
    """

    def __init__(self, policies: Policies, *, check: str, endings: Endings) -> None:
        super().__init__(policies, check=check, endings=endings)
        self._streams = RandomStreams()
        # Whether optimizers hold the module's parameters as they are now, not as an earlier fit gave them back.
        self._has_cut_optimizers = True

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if (trainer := self._trainer) is not None:
            self._streams.add_to(checkpoint, trainer, self.root_device)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if (trainer := self._trainer) is not None and trainer.state.fn == TrainerFn.FITTING:
            self._streams.take_from(checkpoint)
        return checkpoint

    @property
    def _trainer(self) -> Trainer | None:
        """There is none before a fit, where there may not even be a module."""
        return None if self.lightning_module is None else _lightning.attached_trainer(self.lightning_module)

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return self._deferral.record is not None  # before, there is nothing to load into

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole_state_dict(self.module, keep=self.is_global_zero)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        widen(self.module, self.precision_plugin)
        load_whole_state_dict(self.module, checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return whole_optimizer_state(optimizer, keep=self.is_global_zero, is_cut=self._has_cut_optimizers)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        tell_missing_states(self.optimizers, states := checkpoint["optimizer_states"])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            load_whole_optimizer_state(optimizer, state)
        self.steps.state_was_loaded()
