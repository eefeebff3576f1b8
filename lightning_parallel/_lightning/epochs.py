"""Positions in an epoch: private names of Lightning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.fabric.utilities.types import _Stateful

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

SamplerWrapper = DistributedSamplerWrapper
"""Deals out what another sampler gives."""

Stateful = _Stateful
"""Objects with `state_dict` and `load_state_dict`; since 1.8, waits for a public name."""


@dataclass(frozen=True)
class Pass:
    """Batches that the training loaders have given since they were begun.

    Args:
        loaders: The loaders.
        iterators: Their iterators, in the same order; none outside of an epoch.
        mode: How they are taken together.
        num_taken: Batches of all of them together.
        num_ahead: How many of these the trainer has not asked for yet.
    """

    loaders: Sequence[Any]
    iterators: Sequence[Any]
    mode: str
    num_taken: int
    num_ahead: int


@runtime_checkable
class Ahead(Protocol):
    """An iterator in place of that of the trainer, which may read more than it has been asked for."""

    inner: Any
    """The trainer's own."""

    def settle(self) -> int:
        """Read nothing until the next batch is asked for; the number of batches that nobody has asked for yet."""


def replace_iterator(trainer: Trainer, replaced: Callable[[Any], Any]) -> None:
    """Let the trainer read batches of training from another iterator, for the rest of this pass.

    `CombinedLoader._iterator`, since 2.0; waits for loaders that can be replaced.

    Args:
        trainer: The trainer, within an epoch.
        replaced: Gives the iterator, from the one that there is.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is not None and combined._iterator is not None:
        combined._iterator = replaced(combined._iterator)


def batches_left(trainer: Trainer) -> float:
    """The number of batches that the trainer will still ask for in this epoch; infinity where nobody knows.

    `_DataFetcher.length` and `fetched`, since 1.5, of `_FitLoop._data_fetcher`; they wait for a public count.
    """
    fetcher = trainer.fit_loop._data_fetcher
    if fetcher is None or fetcher.length is None:
        return float("inf")
    return max(0, fetcher.length - fetcher.fetched)


def training_pass(trainer: Trainer) -> Pass | None:
    """The pass of `trainer` over its training loaders, ``None`` where it has none.

    `_FitLoop._combined_loader` and `_data_fetcher`, `CombinedLoader._iterator` and `_mode`, `_ModeIterator._idx`, since
    2.0; they wait for a public position.
    """
    combined, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    if combined is None:
        return None
    found: Any = combined._iterator
    ahead = len(getattr(fetcher, "batches", ()))
    if isinstance(found, Ahead):
        ahead += found.settle()
    iterator = found.inner if isinstance(found, Ahead) else found
    taken = 0 if iterator is None else iterator._idx
    return Pass(combined.flattened, () if iterator is None else iterator.iterators, combined._mode, taken, ahead)


def place_of_epoch(trainer: Trainer) -> tuple[int, bool]:
    """The number of the epoch that samplers are told, and whether it has begun.

    `_FitLoop.epoch_progress`, since 1.5, is typed for counters that have less.
    """
    current: Any = trainer.fit_loop.epoch_progress.current
    return int(current.processed), bool(current.started > current.processed)


def begin_pass(trainer: Trainer) -> None:
    """Begin the training loaders anew. `_FitLoop._data_fetcher`, since 1.5; waits for a public call."""
    assert trainer.fit_loop._data_fetcher is not None
    iter(trainer.fit_loop._data_fetcher)


def leave_ended_epoch(trainer: Trainer) -> None:
    """Let `trainer` begin an epoch after a checkpoint of the end of the one before, as it begins any other.

    After one of the last batch, Lightning takes the next epoch for one that has begun: it calls no
    `on_train_epoch_start`, and checkpoints of this and all later epochs say that none is under way. After one that
    `on_train_epoch_end` saved under `max_steps` without `max_epochs`, it reads one more batch of the epoch. After one
    of the last batch of loaders without a length, batches of the next epoch have numbers that go on.
    `_FitLoop.restarted_mid_epoch`, `restarted_on_epoch_end` and `update_restart_stage`, since 2.5.1, and `_restarting`;
    they wait for Lightning to do so.
    """
    fit_loop = trainer.fit_loop
    progress: Any = fit_loop.epoch_progress.current
    if progress.started != progress.processed:
        return
    if fit_loop.restarted_mid_epoch:
        fit_loop.reset_restart_stage()
        batches = fit_loop.epoch_loop
        if batches.restarted_on_train_batch_end and trainer.num_training_batches == float("inf"):
            _count_from_the_first(batches)
    elif fit_loop.restarted_on_epoch_end:
        fit_loop.epoch_progress.increment_completed()
        fit_loop._restarting = fit_loop.epoch_loop.restarting = False  # the loop's own setter goes by `max_epochs`
        fit_loop.update_restart_stage()


def _count_from_the_first(batches: Any) -> None:
    """Do what `_TrainingEpochLoop.reset` does behind the last batch of an epoch whose length is known."""
    batches.batch_progress.increment_completed()
    for counter in (batches.batch_progress, batches.scheduler_progress, batches.automatic_optimization.optim_progress):
        counter.reset_on_run()
    batches.val_loop.batch_progress.total.reset()
    batches.reset_restart_stage()


def load_waiting_states(trainer: Trainer) -> bool:
    """Give loaders the states of a checkpoint that they were made too early for; whether there were any.

    `_FitLoop._combined_loader_states_to_load`, since 2.2; waits for a trainer that does so itself.
    """
    if not trainer.fit_loop._combined_loader_states_to_load:
        return False
    trainer.fit_loop._load_combined_loader_states()
    return True


def set_back_batches(trainer: Trainer, shift: int) -> None:
    """Let `trainer`, which is about to go on in the middle of an epoch, count batches from another number on.

    `_TrainingEpochLoop._should_accumulate`, since 1.1, and `_batches_that_stepped`, since 1.6, which Lightning counts
    up where it takes the last batch for one that stepped; they wait for a public counter.

    Args:
        trainer: The trainer.
        shift: What to add to the counters.
    """
    loop = trainer.fit_loop.epoch_loop
    stepped = not loop._should_accumulate()
    for counter in (loop.batch_progress.total, loop.batch_progress.current):
        for name in ("ready", "started", "processed", "completed"):
            setattr(counter, name, getattr(counter, name) + shift)
    if loop.restarted_on_train_batch_end or not loop.restarted_on_last:
        loop._batches_that_stepped += int(stepped) - int(not loop._should_accumulate())


def inner_sampler(sampler: DistributedSamplerWrapper) -> Any:
    """The sampler whose samples `sampler` deals out. `_DatasetSamplerWrapper._sampler`, since 1.5; no public one."""
    return sampler.dataset._sampler  # type: ignore[attr-defined]
