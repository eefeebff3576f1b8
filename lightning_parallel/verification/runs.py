"""The two runs that are compared: one under a strategy, recorded, and one of one process, on the recorded batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset

from lightning_parallel.checkpoint.full_state import full_state_dict
from lightning_parallel.verification.recorder import Recorder
from lightning_parallel.verification.records import Evaluation, Record, joined, readers_of

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule, Trainer

ENTRY_POINTS = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}
"""Command -> the step that a module needs for it."""
_LOADERS = {"fit": "train_dataloader", "validate": "val_dataloader", "test": "test_dataloader"}


@dataclass
class Parts:
    """Everything that one run needs, made anew for each.

    Args:
        trainer: The trainer.
        module: The module.
        data: A data module, where there is one.
        loaders: Loaders by entry point, where neither the module nor a data module has them.
        strategy: The strategy as it was given.
    """

    trainer: Trainer
    module: LightningModule
    data: LightningDataModule | None = None
    loaders: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = ""

    def run(self, name: str, loaders: Any = None, **kwargs: Any) -> None:
        """Run an entry point.

        Args:
            name: ``"fit"`` or one of `ENTRY_POINTS`.
            loaders: Instead of those of the user.
            kwargs: More arguments for it.
        """
        if loaders is None:
            loaders = self.loaders.get(name)
            kwargs |= {"datamodule": self.data} if loaders is None else {}
            if name == "fit" and (validation := self.loaders.get("validate")) is not None:
                kwargs["val_dataloaders"] = validation
        getattr(self.trainer, name)(self.module, loaders, **kwargs)

    def has(self, name: str) -> bool:
        """Whether the module has the step of an entry point, and somebody a loader for it."""
        if not is_overridden(ENTRY_POINTS[name], self.module):
            return False
        hook = _LOADERS.get(name, "predict_dataloader")
        is_of_data = self.data is not None and is_overridden(hook, self.data)
        return name in self.loaders or is_of_data or is_overridden(hook, self.module)


Make = Callable[..., Parts]
"""Called with callbacks and, for the reference, with the number by which its accumulation windows are longer."""


def run_recorded(make: Make, folder: Path) -> Record:
    """Train under a strategy, evaluate, and resume from the middle. Call it on all ranks.

    Args:
        make: Makes the parts of a run from ``callbacks=[...]``.
        folder: Where a checkpoint goes, the same for all ranks.

    Returns:
        This rank's record.
    """
    checkpoint = folder / "middle.ckpt"
    recorder = Recorder(checkpoint=checkpoint, after=1)
    parts = make(callbacks=[recorder])
    parts.run("fit")
    _evaluate(parts, recorder)
    record = recorder.record
    record.strategy = parts.strategy
    if record.saved_after is not None and len(record.weights) > record.saved_after[1] + 1:
        rest = _behind(record, record.saved_after[0])
        random = [step.random for step in record.microsteps[record.saved_after[0] :]]
        repeated = Recorder(random=random)
        again = make(callbacks=[repeated])
        with warnings.catch_warnings():
            # A stream in place of the loader, which gives just what is left of the epoch.
            warnings.filterwarnings("ignore", message="training goes on in the middle of epoch")
            again.run("fit", _replayed(rest), val_dataloaders=_validation_loaders([record]), ckpt_path=str(checkpoint))
        record.resumed = full_state_dict(again.trainer)
        record.again = [step.logged for step in repeated.record.microsteps]
    return record


def run_reference(make: Make, records: Sequence[Record]) -> Record:
    """Train in one process, on the batches of all readers in turn, from their random states, and evaluate.

    A module that optimizes by itself updates in each step: it takes the batches of all readers as one.

    Args:
        make: Makes the parts of a run from ``callbacks=[...]`` and ``longer=n``, by which windows are longer.
        records: Of all ranks.
    """
    readers = readers_of(list(records))
    longer = len(readers)
    takes: Literal["turns", "joined", "first"] = "turns"
    if records[0].is_manual and len(readers) > 1:
        longer = 1
        random, batches = [step.random for step in readers[0].microsteps], _joined_epochs(readers)
        takes = "joined" if batches else "first"
        batches = batches or _behind(readers[0], 0)
    else:
        epochs = [_in_turn(epochs) for epochs in zip(*(record.epochs for record in readers), strict=True)]
        random = [step.random for epoch in epochs for step in epoch]
        batches = [[step.batch for step in epoch] for epoch in epochs]
    recorder = Recorder(random=random, initial=records[0].weights[0])
    recorder.record.takes = takes
    parts = make(callbacks=[recorder], longer=longer)
    parts.run("fit", _replayed(batches), val_dataloaders=_validation_loaders(readers))
    parts.module.load_state_dict(records[0].weights[-1])
    _evaluate(
        parts,
        recorder,
        {name: _together([record.evaluations[name] for record in readers]) for name in records[0].evaluations},
    )
    return recorder.record


def _evaluate(parts: Parts, recorder: Recorder, batches: Mapping[str, list[list[Any]]] | None = None) -> None:
    for name in ENTRY_POINTS:
        if not parts.has(name) or (batches is not None and name not in batches):
            continue
        loaders = None if batches is None else [_replayed([each]) for each in batches[name]]
        parts.run(name, loaders)
        recorder.note_values(name, parts.trainer)


def _validation_loaders(readers: Sequence[Record]) -> list[Any] | None:
    """Loaders that give the batches of all readers in turn, in each validation of a fit those of that one."""
    runs = [_together(each) for each in zip(*(record.validations for record in readers), strict=True)]
    return [_replayed(each) for each in zip(*runs, strict=True)] if runs else None


def _together(evaluations: Sequence[Evaluation]) -> list[list[Any]]:
    """For each loader, the batches of all readers in turn."""
    return [_in_turn(each) for each in zip(*(each.batches for each in evaluations), strict=True)]


def _in_turn(lists: Iterable[Sequence[Any]]) -> list[Any]:
    """The first of each list, then the second of each, and so on."""
    return [each for turn in zip(*lists, strict=True) for each in turn]


def _joined_epochs(readers: Sequence[Record]) -> list[list[Any]] | None:
    """The batches of each step, joined to one, by epoch; ``None`` if they cannot be joined."""
    epochs = [
        [joined([step.batch for step in steps]) for steps in zip(*each, strict=True)]
        for each in zip(*(record.epochs for record in readers), strict=True)
    ]
    return None if any(batch is None for epoch in epochs for batch in epoch) else epochs


def _behind(record: Record, number: int) -> list[list[Any]]:
    """The batches behind the first `number` of them, by epoch."""
    found = []
    for epoch in record.epochs:
        rest = epoch[number:]
        number -= min(number, len(epoch))
        if rest:
            found.append([step.batch for step in rest])
    return found


class _Replayed(IterableDataset[Any]):
    """Batches by epoch: each iteration is the next epoch."""

    def __init__(self, epochs: Sequence[Sequence[Any]]) -> None:
        self._epochs = list(epochs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._epochs.pop(0) if self._epochs else [])


def _replayed(epochs: Sequence[Sequence[Any]]) -> DataLoader[Any]:
    return DataLoader(_Replayed(epochs), batch_size=None)
