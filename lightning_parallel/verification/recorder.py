"""A callback that records a run, and one that lets another run take the same steps."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.checkpoint.full_state import full_state_dict
from lightning_parallel.ranks.random_streams import RandomState, unchanged_generators
from lightning_parallel.strategies.batches_of_rank import BatchesOfRank
from lightning_parallel.strategies.compared_strategy import shares_samples
from lightning_parallel.strategies.planned_strategy import PlannedStrategy
from lightning_parallel.verification.records import Evaluation, Microstep, Record, fingerprint_of, tensors_in

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

_HOST = torch.device("cpu")
_MOST_INDICES = 1_000_000


class Recorder(Callback):
    """Records what a rank reads, computes and ends with.

    Args:
        random: For each step of training the state from which it draws, instead of its own.
        initial: The weights with which training begins, instead of its own.
        checkpoint: Where a checkpoint is saved in the middle of training.
        after: The number of updates after which it is.
    """

    def __init__(
        self,
        *,
        random: Sequence[RandomState | None] = (),
        initial: Mapping[str, Tensor] | None = None,
        checkpoint: Path | None = None,
        after: int = 0,
    ) -> None:
        self.record = Record()
        self._given = list(random)
        self._initial = initial
        self._checkpoint, self._after = checkpoint, after
        self._num_updates = 0
        self._num_steps = 0
        self._before_validation: set[str] = set()
        self._open = contextlib.ExitStack()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy, record = trainer.strategy, self.record
        record.rank, record.is_manual = trainer.global_rank, not pl_module.automatic_optimization
        if trainer.world_size > 1 and (ranks := trainer.distributed_sampler_kwargs):
            record.reader, record.num_readers = ranks["rank"], ranks["num_replicas"]
        if isinstance(strategy, PlannedStrategy):
            record.shares_samples = shares_samples(strategy)
            # Modules that compute in fp32 inside of a run in fp64 round as fp32 does.
            strategy.first_step.finest = torch.finfo(torch.float32).eps

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.weights.append(full_state_dict(trainer))
        parameters = {name for name, _ in pl_module.named_parameters(remove_duplicate=False)}
        self.record.buffers = set(self.record.weights[0]) - parameters
        if self._initial is not None and _differ(self._initial, self.record.weights[0]):
            pl_module.load_state_dict(self._initial)
        self._num_updates = trainer.global_step
        holder, name = trainer.strategy, "training_step"
        if isinstance(trainer.strategy, PlannedStrategy):
            # In there, this rank draws from the stream of its own.
            holder, name = trainer.strategy.first_step, "run"  # type: ignore[assignment]
        self._open.enter_context(_replaced(holder, name, self._noted(getattr(holder, name), trainer)))

    def _noted(self, run: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
        """`run`, drawing from the state that was given for it, and what it draws noted."""
        device = trainer.strategy.root_device

        def noted(*args: Any, **kwargs: Any) -> Any:
            first_step = getattr(trainer.strategy, "first_step", None)
            if first_step is not None and first_step.is_paused:
                return run(*args, **kwargs)
            before, step = RandomState.take(device), self.record.epochs[-1][-1]
            given = self._given[self._num_steps] if self._num_steps < len(self._given) else None
            self._num_steps += 1
            step.random = given or before
            step.random.restore(device)
            output = run(*args, **kwargs)
            step.draws = not torch.equal(torch.get_rng_state(), step.random.host)
            if given is not None:
                before.restore(device)
            return output

        return noted

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.record.epochs.append([])
        if self.record.indices is None and self.record.num_readers > 1:
            record = self.record
            record.indices, record.num_samples, record.num_dropped = _dealt_out(trainer.train_dataloader)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if not self.record.epochs:  # resumed within an epoch
            self.record.epochs.append([])
        self.record.epochs[-1].append(Microstep(copy.deepcopy(batch), fingerprint_of(batch)))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            # Lightning hands out the loss as it goes into the sum of an accumulation window.
            parts = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self.record.epochs[-1][-1].loss = float(loss.detach()) * parts
        self.record.epochs[-1][-1].logged = _numbers(trainer.callback_metrics)
        if trainer.global_step == self._num_updates:
            return
        self._num_updates = trainer.global_step
        self.record.weights.append(full_state_dict(trainer))
        if self._checkpoint is not None and self._num_updates >= self._after:
            trainer.save_checkpoint(self._checkpoint)
            self.record.saved_after = len(self.record.microsteps), len(self.record.weights) - 1
            self._checkpoint = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open.close()
        self.record.logged = _numbers(trainer.callback_metrics)
        self.record.first_step = getattr(getattr(trainer.strategy, "first_step", None), "outcome", "")

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._open.close()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.record.validations.append(Evaluation())
            self._before_validation = set(trainer.callback_metrics) - self.record.of_validation

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.record.of_validation |= set(trainer.callback_metrics) - self._before_validation

    @override
    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            _note_batch(self.record.validations[-1], *args, **kwargs)
        else:
            _note_batch(self._evaluation("validate"), *args, **kwargs)

    @override
    def on_test_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        _note_batch(self._evaluation("test"), *args, **kwargs)

    @override
    def on_predict_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        _note_batch(self._evaluation("predict"), *args, **kwargs)

    @override
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        predictions = self._evaluation("predict").predictions
        while len(predictions) <= dataloader_idx:
            predictions.append([])
        predictions[dataloader_idx].append(tensors_in(outputs))

    def note_values(self, name: str, trainer: Trainer) -> None:
        """Note what the entry point `name`, which has ended, has logged."""
        self._evaluation(name).values = _numbers(trainer.callback_metrics)

    def _evaluation(self, name: str) -> Evaluation:
        return self.record.evaluations.setdefault(name, Evaluation())


def _note_batch(
    evaluation: Evaluation, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
) -> None:
    batches = evaluation.batches
    while len(batches) <= dataloader_idx:
        batches.append([])
    batches[dataloader_idx].append(copy.deepcopy(batch))


@contextlib.contextmanager
def _replaced(holder: object, name: str, value: Any) -> Iterator[None]:
    vars(holder)[name] = value
    try:
        yield
    finally:
        vars(holder).pop(name, None)


def _differ(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    return list(first) != list(second) or any(
        not _torch.dense_parts.is_same(first[name], second[name]) for name in first
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items() if torch.as_tensor(value).numel() == 1}


def _dealt_out(loader: Any) -> tuple[list[int] | None, int, int]:
    """The samples that the sampler of this rank deals out in an epoch, the number of all, and at most left out.

    No generator changes.
    """
    # The strategy notes what is read through its own batch sampler.
    noting = getattr(loader, "batch_sampler", None)
    inner = getattr(noting, "batches", noting)
    if not isinstance(loader, DataLoader) or not isinstance(inner, BatchSampler | BatchesOfRank):
        return None, 0, 0
    of_batches = inner.batch_sampler if isinstance(inner, BatchesOfRank) else inner
    sampler = getattr(of_batches, "sampler", None)
    known = (RandomSampler, SequentialSampler, DistributedSampler)
    if not isinstance(of_batches, BatchSampler) or not isinstance(sampler, known):
        return None, 0, 0
    if getattr(sampler, "generator", None) is not None:  # to iterate over it would change that
        return None, 0, 0
    num_samples = len(loader.dataset)  # type: ignore[arg-type]
    if num_samples > _MOST_INDICES:
        return None, 0, 0
    # An incomplete batch at the end has at least one sample less than a complete one.
    num_dropped = max(0, of_batches.batch_size - 1) if of_batches.drop_last else 0
    num_dropped += int(getattr(sampler, "drop_last", False))
    with unchanged_generators(_HOST):
        return [index for batch in inner for index in batch], num_samples, num_dropped
