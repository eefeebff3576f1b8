"""Strategies whose ranks stay in lock step where they have different numbers of batches."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.parallelize import parallelized
from lightning_parallel.ranks.fingerprints import of_batch
from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.epoch_ends import EpochEnds
from lightning_parallel.strategies.equal_changes import EqualChanges
from lightning_parallel.strategies.equal_copies import EqualCopies
from lightning_parallel.strategies.equal_setups import different_modules, different_optimizers, different_settings
from lightning_parallel.strategies.evaluation_turns import EvaluationTurns, nothing_left
from lightning_parallel.strategies.loader_lengths import equal_readers, length_violations, unequal_sharers
from lightning_parallel.strategies.process_group import ProcessGroupStrategy
from lightning_parallel.strategies.rank_buffers import RankBuffers
from lightning_parallel.strategies.sampling import are_dealt_out

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from lightning_parallel._torch.written_numbers import Number


class LockStepStrategy(ProcessGroupStrategy):
    """Ends epochs of training on all ranks together, and counts each sample once where it evaluates."""

    _epoch_ends: EpochEnds | None = None
    _turns: EvaluationTurns | None = None
    _rank_buffers: RankBuffers | None = None
    _looks: tuple[EqualChanges, EqualCopies] | None = None
    _readers: list[int]
    _compared: set[tuple[Any, int]]

    @property
    def _host_group(self) -> dist.ProcessGroup:
        return build_host_group(self._device_type, timeout=self._timeout)

    @override
    def setup(self, trainer: Trainer) -> None:
        if self.world_size > 1:
            self._readers = of_all_ranks(self.data_rank)
            self._compared = set()
            if trainer.state.fn == TrainerFn.FITTING:
                # Before `configure_optimizers`, in which a schedule may ask how many steps there will be.
                self._epoch_ends = EpochEnds(trainer, self._host_group, self._readers, self.refuse)
        super().setup(trainer)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        loader = super().process_dataloader(dataloader)
        if self.world_size > 1 and self._has_to_meet:
            self.refuse(length_violations(of_all_ranks(sized_len(loader))))
        return loader

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        trainer = self.module.trainer
        loader = trainer.state.stage, dataloader_idx
        is_new = self.world_size > 1 and loader not in self._compared
        # Elsewhere than in training, some ranks may have no batch.
        if is_new and self._has_to_meet and (self._shares_samples or trainer.training):
            # Once for each loader: a set-up in which ranks read different samples shows in the first batch.
            self._compared.add(loader)
            is_dealt = are_dealt_out(_lightning.training_loaders(trainer))
            found, are_dealt = zip(*of_all_ranks((of_batch(batch), is_dealt)), strict=True)
            stage = getattr(trainer.state.stage, "value", "the run")
            self.refuse(unequal_sharers(found, self._readers, f"{stage}, loader {dataloader_idx}"))
            if trainer.training and not any(are_dealt) and (warning := equal_readers(found, self._readers)):
                rank_zero_warn(warning)
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    def _shares_samples(self) -> bool:
        """Whether several ranks compute the same samples together."""
        return self.world_size > 1 and len(set(self._readers)) < self.world_size

    @property
    def _has_to_meet(self) -> bool:
        """Whether ranks depend on each other's batches: not where each of them predicts by itself."""
        return self.module.trainer.state.fn != TrainerFn.PREDICTING or self.steps.meets_in_steps

    @property
    def meets_for_batches(self) -> bool:
        """Whether ranks wait for each other before each batch of training."""
        return self._epoch_ends is not None and self._epoch_ends.asks

    @property
    @override
    def may_be_uneven(self) -> bool:
        module = self.lightning_module  # none is connected yet where a script asks between runs
        return self._turns is not None or (module is not None and module.trainer.predicting)

    @property
    def left_out(self) -> set[str]:
        """Names of parameters and buffers that ranks do not send each other."""
        return set()

    @override
    def check_module(self, module: LightningModule, *, is_built: bool = False) -> None:
        if is_built and parallelized(module) is None:
            self.refuse(different_modules(module, self.left_out))
        super().check_module(module, is_built=is_built)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.refuse(different_settings(self.module.trainer))  # before callbacks are set up, some of which meet there

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        self.refuse(different_optimizers(self.module, self.optimizers))

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        self.refuse(different_modules(self.module, self.left_out))  # again, for what hooks have added
        if self.world_size > 1:
            self._rank_buffers = RankBuffers(self.module)
            self._end_looks()  # of a search before training, such as that for a batch size
            if self.first_step.check != "off":
                changes = EqualChanges(self.module, self._readers)
                self._looks = changes, EqualCopies(self.module, self.root_device)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._rank_buffers is not None:
            self._rank_buffers.begin_step()
        for ranks in self._looks or ():
            ranks.look()

    def on_write(self, call: str, number: Number) -> None:
        """Note what user code writes into tensors of which each rank has a part.

        Args:
            call: What it has called.
            number: The numbers it was given.
        """
        if self._looks is not None:
            self._looks[0].on_write(call, number)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._looks is not None:
            self._looks[0].compare()

    def _end_looks(self) -> None:
        if self._looks is not None:
            self._looks[0].close()
        self._looks = None

    def _begin_turns(self) -> None:
        self._end_turns()
        if self.world_size > 1 and self._has_to_meet:
            loop, meets = _lightning.fetchers.evaluation_loop(self.module.trainer), self.steps.meets_in_steps
            self._turns = EvaluationTurns(loop, self._host_group, self._readers, self.refuse, meets=meets)

    def _end_turns(self) -> None:
        if self._turns is not None:
            self._turns.close()
        self._turns = None

    @override
    def evaluate(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._turns is None:
            return super().evaluate(name, args, kwargs)
        wrapped = self.model
        if self._turns.are_uneven:
            # DDP sends the buffers of rank 0 in each forward. All ranks have these since their first batch.
            self.model = self.module
        try:
            result = super().evaluate(name, args, kwargs)
        finally:
            self.model = wrapped
        self._turns.note(functools.partial(self._evaluate_again, name, args, kwargs))
        if name == "predict_step":
            self._turns.finish()  # Lightning's loop of predictions says nothing behind a batch
        return result

    def _evaluate_again(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with nothing_left(self.module, self.root_device):
            super().evaluate(name, args, kwargs)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._begin_turns()

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._begin_turns()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._begin_turns()

    @override
    def on_validation_end(self) -> None:
        self._end_turns()

    @override
    def on_test_end(self) -> None:
        self._end_turns()

    @override
    def on_predict_end(self) -> None:
        self._end_turns()

    @override
    def teardown(self) -> None:
        self._end_turns()
        self._rank_buffers = None
        self._end_looks()
        if self._epoch_ends is not None:
            self._epoch_ends.detach()
            self._epoch_ends = None
        super().teardown()
