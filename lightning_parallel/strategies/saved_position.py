"""The position in the data, as a checkpoint has it: how much all ranks together have read of an epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_parallel import _lightning, _torch
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.positioned_batches import batches_of
from lightning_parallel.strategies.restored_loaders import state_entry

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def saved_position(trainer: Trainer, states: list[Any], data_rank: int) -> dict[str, Any]:
    """Return how far an epoch has been read, of all training loaders. A collective.

    Args:
        trainer: The trainer, in a fit that has loaders.
        states: Those of loaders that have states of their own.
        data_rank: This rank among those that read different samples.
    """
    training = _lightning.epochs.training_pass(trainer)
    assert training is not None
    epoch, is_in_epoch = _lightning.epochs.place_of_epoch(trainer)
    rewound = 0
    if all(batches_of(loader) is not None for loader in training.loaders):
        rewound = _open_window(trainer)
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    behind = training.num_ahead + num_in_flight(current) + rewound
    own = [_own_entry(training, index, behind, states) for index in range(len(training.loaders))]
    everyone = of_all_ranks((data_rank, own))
    return {
        "epoch": epoch,
        "is_in_epoch": is_in_epoch,
        "rewound": rewound,
        "loaders": [_merged(index, everyone) for index in range(len(own))],
    }


def num_in_flight(current: Any) -> int:
    """Return 1 within a step whose batch Lightning will read again after a resume, else 0."""
    return 0 if current.processed == current.ready else int(current.ready - current.completed)


def _open_window(trainer: Trainer) -> int:
    """Batches of an accumulation window that has not ended: their gradients are in no checkpoint."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    number = progress.current.ready - num_in_flight(progress.current)
    if progress.is_last_batch or number >= trainer.num_training_batches:
        return 0
    return int(number % trainer.accumulate_grad_batches)


def _own_entry(training: _lightning.epochs.Pass, index: int, behind: int, states: list[Any]) -> tuple[Any, Any]:
    """This rank's part of a loader: the entry, and its own part of it."""
    loader = training.loaders[index]
    if isinstance(loader, _lightning.epochs.Stateful):
        return state_entry(loader), states.pop(0) if states else None
    batches = batches_of(loader)
    if batches is None:
        return {"kind": "none", "reason": "which has no indices whose order can be drawn again"}, None
    iterator = training.iterators[index] if index < len(training.iterators) else None
    number = _torch.loaders.num_read(iterator)
    if training.mode == "max_size":
        number = min(number, training.num_taken - behind)
    else:
        number -= behind
    found = batches.entry(_torch.loaders.indices_of(iterator), max(0, number))
    if found is None:
        return {"kind": "none", "reason": "of which no batch had been read when it was saved"}, None
    return found


def _merged(index: int, everyone: Sequence[tuple[int, Any]]) -> dict[str, Any]:
    """The entry of a loader, with what each rank that reads other samples has to say."""
    entry = dict(everyone[0][1][index][0])
    own = [(data_rank, loaders[index][1]) for data_rank, loaders in everyone]
    if entry["kind"] == "state":
        entry["states"] = [state for _, state in sorted(dict(own).items())]
    elif entry["kind"] == "order":
        part = entry["parts"][-1]
        keyed = {rank if part["num_ranks"] > 1 else data_rank: checksum for data_rank, (rank, checksum) in own}
        entry["parts"] = [*entry["parts"][:-1], {**part, "digests": [each for _, each in sorted(keyed.items())]}]
    return entry
