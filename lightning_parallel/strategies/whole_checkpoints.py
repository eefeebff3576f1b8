"""Strategies whose checkpoints mean what those of one process do, in either form, and hold all random states."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.folder_writer import Staging
from lightning_parallel.checkpoint.full_state import (
    load_whole_optimizer_state,
    load_whole_state_dict,
    whole_optimizer_state,
    whole_state_dict,
)
from lightning_parallel.checkpoint.kept_parts import with_whole_parts
from lightning_parallel.checkpoint.stage_entries import take_entries_of_stages
from lightning_parallel.checkpoint.whole_file import bytes_of_state
from lightning_parallel.module.differences import first_of
from lightning_parallel.module.kept_state import is_persistent
from lightning_parallel.policies import Policies
from lightning_parallel.ranks.memory import host_memory
from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.ranks.objects import is_shared, of_all_ranks
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.strategies.background_saves import Job, form_of
from lightning_parallel.strategies.checkpoint_files import local_path
from lightning_parallel.strategies.metric_sync import tell_kept_states
from lightning_parallel.strategies.optimizers import tell_missing_states
from lightning_parallel.strategies.planned_strategy import PlannedStrategy
from lightning_parallel.strategies.precision import widen
from lightning_parallel.strategies.saving_strategy import Saving
from lightning_parallel.strategies.sharded_saves import parts_job
from lightning_parallel.strategies.streams import RandomStreams
from lightning_parallel.techniques.optimizer_sharding import shards_itself

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


_SHARE_OF_MEMORY = 4
"""Of a rank's share of the host's memory, whole state may take one part in so many."""


_OTHER_CHECKPOINT = (
    "ranks go on from different checkpoints: rank 0 has found {}, and rank {} {}. Each rank looks for "
    "ckpt_path='last' and 'best' itself, and reads what it sees: give ModelCheckpoint a dirpath that all ranks share"
)

_NOT_HERE = (
    "checkpoint='sharded' writes to a file system of this machine, and not to {}; give a folder of one, or "
    "checkpoint='whole'"
)
_SPARSE = (
    "checkpoint={!r} writes folders, which have no sparse tensors: {} of {} are sparse; register them with "
    "persistent=False, or give checkpoint='whole'"
)


class WholeCheckpointsStrategy(PlannedStrategy):
    """Saves whole values from rank 0, or those of each rank, and loads them on every rank, also before a fit.

    Args:
        policies: The rules, without those that depend on the module.
        check: Whether the first step is compared with one process.
        saving: How checkpoints are written, and how a run ends.
    """

    def __init__(self, policies: Policies, *, check: str, saving: Saving) -> None:
        super().__init__(policies, check=check, saving=saving)
        self._streams = RandomStreams()
        # Whether optimizers hold the module's parameters as they are now, not as an earlier fit gave them back.
        self._has_cut_optimizers = True
        # Whether the checkpoint that is being made has the tensors of each rank.
        self._writes_parts = False
        # Whether all ranks are about to load the checkpoint with which a run begins.
        self._begins_with_checkpoint = False
        self._staging = Staging()

    @property
    def state_of_steps(self) -> RandomState | None:
        """The state of generators from which the next step draws; ``None`` where it is that of hooks and loaders."""
        return self._streams.of_steps

    @property
    def writes_parts(self) -> bool:
        """Whether the checkpoint that is being made has the tensors of each rank."""
        return self._writes_parts

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self._failures.meet()
        if (trainer := self._trainer) is not None:
            self._streams.add_to(checkpoint, trainer, self.root_device)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self._begins_with_checkpoint:  # and no rank has called this by itself
            self._begins_with_checkpoint = False
            epoch, step = checkpoint.get("epoch"), checkpoint.get("global_step")
            self._check_same_checkpoint(f"{checkpoint_path} (epoch {epoch}, step {step})", (epoch, step))
        if (trainer := self._trainer) is not None and trainer.state.fn == TrainerFn.FITTING:
            self._streams.take_from(checkpoint)
        return checkpoint

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if (trainer := self._trainer) is not None:
            _lightning.resuming.before_loading(trainer, self._check_all_have_one)

    def _check_all_have_one(self, path: Any) -> None:
        self._check_same_checkpoint(str(path or "none"), bool(path))
        self._begins_with_checkpoint = bool(path)

    def _check_same_checkpoint(self, told: str, mark: object) -> None:
        """Refuse ranks that do not all go on from the same checkpoint, or from none. A collective.

        Args:
            told: The one that this rank has found, in words.
            mark: Equal on ranks that have found the same one; their folders may be copies.
        """
        found = of_all_ranks((told, mark))
        other = next((rank for rank, (_, each) in enumerate(found) if each != found[0][1]), None)
        if other is not None:
            self.refuse([_OTHER_CHECKPOINT.format(found[0][0], other, found[other][0])])

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
        if self.steps.meets_in_steps:
            # A rank that saves alone (`if trainer.is_global_zero: trainer.save_checkpoint(...)`) would gather what
            # another collective of the others brings.
            self._failures.meet()
        if (trainer := self._trainer) is not None:
            ranks = trainer.distributed_sampler_kwargs or {}
            tell_kept_states(self.module, ranks.get("num_replicas", 1))
        self._writes_parts = self._chooses_parts()
        if self._writes_parts:
            entries = self.module.state_dict()
            take_entries_of_stages(self.module, entries, keep=True, has_parts=True)
            return entries
        return whole_state_dict(self.module, keep=self.is_global_zero, outlines=True)

    @override
    def module_violations(self, module: LightningModule, *, is_fitting: bool) -> list[str]:
        found = super().module_violations(module, is_fitting=is_fitting)
        if is_fitting and form_of(self._saving.checkpoint) == "sharded" and (names := _sparse_buffers(module)):
            found.append(_SPARSE.format(self._saving.checkpoint, first_of(names), type(module).__name__))
        return found

    def _chooses_parts(self) -> bool:
        """Whether the next checkpoint is a folder. A collective."""
        if (form := form_of(self._saving.checkpoint)) != "auto":
            return form == "sharded"
        if self.has_own_writer or not self._keeps_here() or _sparse_buffers(self.module):
            return False
        room = host_memory() // max(1, self.num_processes) // _SHARE_OF_MEMORY
        return self.said_by_first(str(bytes_of_state(self.module, self.optimizers) > room)) == str(True)

    def _keeps_here(self) -> bool:
        """Whether the folders that are known of before are all on a file system of this machine."""
        if (trainer := self._trainer) is None:
            return True
        folders = [trainer.default_root_dir, *(getattr(each, "dirpath", "") for each in trainer.checkpoint_callbacks)]
        return all(local_path(folder) is not None for folder in folders if folder)

    @override
    def save_job(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> Job:
        if is_shared():
            others = {name: checkpoint[name] for name in checkpoint if name not in ("state_dict", "optimizer_states")}
            group = build_host_group(self.root_device.type)
            checkpoint = {**checkpoint, **with_whole_parts(others, group)}
        if not self._writes_parts:
            return super().save_job(checkpoint, filepath, storage_options)
        self._writes_parts = False  # a dict that a user makes has whole tensors
        if (path := local_path(filepath)) is None:
            return lambda exchange: (_NOT_HERE.format(filepath), None)
        known = ("epoch", "global_step", "pytorch-lightning_version")
        manifest = {
            "strategy": type(self).__name__,
            "degrees": asdict(self.degrees),
            "plan": None if self._planned is None else json.loads(self._planned[1].to_json()),
            "dtypes": sorted({str(value.dtype) for value in self.module.parameters()}),
            **{name: checkpoint[name] for name in known if name in checkpoint},
        }
        staging = self._staging if self._saves_in_background else None
        return parts_job(self, self.module, checkpoint, path, manifest, staging)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        widen(self.module, self.precision_plugin)
        load_whole_state_dict(self.module, checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if shards_itself(optimizer):
            return super().optimizer_state(optimizer)  # Lightning has it gather its state
        if self._writes_parts:
            return optimizer.state_dict()
        return whole_optimizer_state(optimizer, keep=self.is_global_zero, is_cut=self._has_cut_optimizers)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        tell_missing_states(self.optimizers, states := checkpoint["optimizer_states"])
        for optimizer, state in zip(self.optimizers, states, strict=False):
            load_whole_optimizer_state(optimizer, state)
        self.steps.state_was_loaded()


def _sparse_buffers(module: nn.Module) -> list[str]:
    """Names of the buffers in the state dict that are sparse."""
    return [
        name
        for name, buffer in module.named_buffers()
        if buffer.layout is not torch.strided and is_persistent(module, name)
    ]
