"""Checkpoints after an exception, of `ModelCheckpoint(save_on_exception=True)`: saved by all ranks, or by none."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_parallel.strategies.saving_strategy import SavingStrategy
from lightning_parallel.techniques.sharding import abandon_step

if TYPE_CHECKING:
    import torch.distributed as dist
    from lightning.pytorch import LightningModule, Trainer

WAIT = 5.0
"""Seconds that a rank which has raised waits for the others to raise, too."""
_PAUSE = 0.05


class ExceptionSaves:
    """Lets callbacks save after an exception where all ranks have raised at the same place; else nobody would answer.

    Saving is a collective: a rank that raises alone would wait for ranks that wait for it in the step.

    Args:
        trainer: Of the fit.
        key: Beginning of the names under which ranks of this run tell each other.
        rank: This one.
        size: The number of ranks.
        store: What they tell each other in.
        place: Returns where in a step this rank is; ranks whose collectives so far are the same return the same.

    Example:
        >>> saves = ExceptionSaves(trainer, key, rank, size, store, place)
        >>> ...  # the fit
        >>> saves.close()
    """

    def __init__(
        self, trainer: Trainer, key: str, rank: int, size: int, store: dist.Store, place: Callable[[], str]
    ) -> None:
        self._key, self._rank, self._size, self._store, self._place = f"{key}/raised", rank, size, store, place
        self._decided: tuple[BaseException, bool] | None = None
        self._callbacks = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint) and getattr(callback, "save_on_exception", False)
        ]
        for callback in self._callbacks:
            vars(callback)["on_exception"] = functools.partial(self._save, callback, callback.on_exception)

    def close(self) -> None:
        """Give the callbacks back as they were."""
        for callback in self._callbacks:
            vars(callback).pop("on_exception", None)
        self._callbacks = []

    def _save(
        self,
        callback: ModelCheckpoint,
        save: Callable[..., None],
        trainer: Trainer,
        module: LightningModule,
        exception: BaseException,
    ) -> None:
        if self._decided is None or self._decided[0] is not exception:
            where = f"update {trainer.global_step}, {type(exception).__name__}, {self._place()}"
            self._decided = exception, self._all_say(where)
        if self._decided[1]:
            abandon_step(module)  # units that the step has left gathered have no shards to save
            with cast(SavingStrategy, trainer.strategy).waiting_for_saves():
                save(trainer, module, exception)
            return
        last = callback.last_model_path or callback.best_model_path
        exception.add_note(
            "ModelCheckpoint(save_on_exception=True) has saved nothing: a checkpoint needs all ranks, and rank "
            f"{self._rank} has raised this alone, or elsewhere in the step than others. "
            + (f"The last checkpoint is {last}" if last else "There is no earlier checkpoint")
        )

    def _all_say(self, where: str) -> bool:
        """Whether all ranks say the same `where` within a few seconds."""
        names = [f"{self._key}/{rank}" for rank in range(self._size)]
        end = time.monotonic() + WAIT
        try:
            self._store.set(names[self._rank], where)
            while not self._store.check(names):
                if time.monotonic() > end:
                    return False
                time.sleep(_PAUSE)
            return all(self._store.get(name).decode() == where for name in names)
        except RuntimeError:  # the store has ended with rank 0
            return False
