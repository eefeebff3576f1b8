"""Strategies whose checkpoints are there whole or not at all; why one could not be written is said on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.checkpoint.copies import kept_apart
from lightning_parallel.checkpoint.sharded_folder import damage_of_folder, is_folder, open_folder
from lightning_parallel.errors import CheckpointError
from lightning_parallel.ranks.objects import is_shared, of_all_ranks
from lightning_parallel.strategies.background_saves import (
    FORMS,
    BackgroundExchange,
    BackgroundSave,
    Exchange,
    Job,
    Outcome,
    form_of,
    is_in_background,
)
from lightning_parallel.strategies.checkpoint_files import CheckpointFiles, local_path, readable
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.strategies.refusing_strategy import RefusingStrategy

_ON_SAVE_ERROR = ("raise", "warn")
_TWO_WRITERS = (
    "checkpoint={!r} writes folders, to which the plugin {} is not asked; leave the plugin out, or give "
    "checkpoint='whole'"
)
_AFTER_ERROR = 30.0
"""Seconds for which a run that has failed waits for the checkpoint that is being written."""


@dataclass(frozen=True)
class Saving:
    """The form of checkpoints, and the ways in which a run ends.

    Args:
        on_save_error: Where a checkpoint cannot be written, ``"raise"`` ends the run, ``"warn"`` goes on without it.
        stop_status: Exit status of a run that a signal has ended.
        checkpoint: The form of checkpoints, and whether training goes on while they are written: `FORMS`.
    """

    on_save_error: str = "raise"
    stop_status: int = 143
    checkpoint: str = "whole"

    @property
    def violations(self) -> list[str]:
        """The reasons why values are none, in words."""
        found = []
        if self.on_save_error not in _ON_SAVE_ERROR:
            found.append(f"on_save_error={self.on_save_error!r} is unknown; possible: {', '.join(_ON_SAVE_ERROR)}")
        if not 0 <= self.stop_status <= 255:
            found.append(f"stop_status={self.stop_status} is no exit status; possible: 0 to 255")
        if self.checkpoint not in FORMS:
            found.append(f"checkpoint={self.checkpoint!r} is unknown; possible: {', '.join(FORMS)}")
        return found


class SavingStrategy(RefusingStrategy):
    """Writes checkpoints from rank 0, or from all ranks to one folder, and reads both.

    Args:
        saving: In which form, and what is to happen where that fails.
    """

    def __init__(self, saving: Saving) -> None:
        super().__init__()
        self._saving = saving
        self._failures = FailureWatch()
        self._has_failed = False
        self._kept: list[Any] = []
        self._pending: BackgroundSave | None = None
        self._num_steps = 0
        self._waits = False

    @override
    def set_up_violations(self) -> list[str]:
        found = [*super().set_up_violations(), *self._saving.violations]
        if form_of(self._saving.checkpoint) == "sharded" and self.has_own_writer:
            found.append(_TWO_WRITERS.format(self._saving.checkpoint, type(self._checkpoint_io).__name__))
        return found

    @property
    def has_own_writer(self) -> bool:
        """Whether a plugin of the user's writes checkpoints."""
        return self._checkpoint_io is not None and not isinstance(self._checkpoint_io, CheckpointFiles)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's, or what writes whole files."""
        io = self._checkpoint_io = self._checkpoint_io or CheckpointFiles()
        if isinstance(io, _lightning.signals.WrappingCheckpointIO) and io.checkpoint_io is None:
            io.checkpoint_io = CheckpointFiles()
        return io

    @checkpoint_io.setter
    @override
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        self._checkpoint_io = io

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        self.settle()
        job = self.save_job(checkpoint, filepath, storage_options)
        if self._saves_in_background:
            exchange = BackgroundExchange(self._failures, self._failures.new_name())
            self._pending = BackgroundSave(job, exchange, filepath)
        else:
            self._conclude(filepath, *job(self))

    @property
    def _saves_in_background(self) -> bool:
        is_asked_for = is_in_background(self._saving.checkpoint) and not self._waits
        return is_asked_for and (self._failures.is_on or not is_shared())

    @contextmanager
    def waiting_for_saves(self) -> Iterator[None]:
        """Inside this context, a save returns when the checkpoint is there: the process may be about to end."""
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def save_job(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> Job:
        """Make a checkpoint ready to be written. A collective.

        Args:
            checkpoint: As Lightning makes it; whole on rank 0.
            filepath: The file.
            storage_options: As Lightning passes them on.

        Returns:
            The rest: it writes the file.
        """
        write, is_first = super().save_checkpoint, self.is_global_zero
        given = checkpoint
        if is_first and self._saves_in_background:
            given = kept_apart(checkpoint, self.lightning_module, self.optimizers)

        def job(exchange: Exchange) -> Outcome:
            cause: Exception | None = None
            if is_first:
                try:
                    write(given, filepath, storage_options=storage_options)
                except Exception as error:
                    cause = error
            return exchange.said_by_first("" if cause is None else _words(cause, filepath)), cause

        return job

    def settle(self) -> None:
        """Wait for the checkpoint that is written in the background. A collective, if there is one.

        Raises:
            CheckpointError: If it could not be written, on all ranks.
        """
        if (pending := self._pending) is not None:
            outcome = pending.wait()
            self._pending = None
            self._conclude(pending.path, *outcome)

    def surface(self) -> None:
        """Call it before each step, on all ranks: a checkpoint that could not be written ends them at the same one."""
        self._num_steps += 1
        if (pending := self._pending) is None:
            return
        has_heard = pending.is_over and bool(pending.outcome[0])
        step = self._failures.agreed_step(pending.name, self._num_steps if has_heard else None)
        if step is not None and self._num_steps >= step:
            self.settle()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.settle()

    def abandon_save(self) -> None:
        """Let a checkpoint be completed after an error, if that is possible at all; nobody hears of it."""
        if self._pending is not None:
            self._pending.wait(_AFTER_ERROR)
            self._pending = None

    def _conclude(self, filepath: Any, problem: str, cause: Exception | None) -> None:
        self._has_failed = bool(problem)
        if not problem:
            self._remove_kept(filepath)
        elif self._saving.on_save_error == "raise":
            raise CheckpointError(problem) from cause
        else:
            rank_zero_warn(f"{problem}. Training goes on, as on_save_error='warn' says")

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        options = {} if weights_only is None else {"weights_only": weights_only}  # Lightning's, since 2.6
        self.settle()
        path = self._intact(checkpoint_path)
        local = local_path(path)
        load = super().load_checkpoint
        if local is not None and is_folder(local):
            return open_folder(local, lambda rest: load(rest, **options))
        return load(path, **options)

    def _intact(self, path: Any) -> Any:
        """The checkpoint to read for `path`, which is another one where that is damaged. A collective."""
        damage = self._damage_of_parts(local) if (local := local_path(path)) is not None and is_folder(local) else None
        # Rank 0 looks at a file for all: each would have to read it once more.
        read, words, problem = path, "", ""
        if self.is_global_zero and damage != "":
            try:
                read, words = readable(path, damage)
            except CheckpointError as error:
                problem = str(error)
        chosen, problem = self.said_by_first(f"{read if words else ''}\n{problem}").split("\n", 1)
        if problem:
            raise CheckpointError(problem)
        if words:
            rank_zero_warn(words)
        return chosen or path

    def _damage_of_parts(self, path: Path) -> str:
        """The damage of a folder, of which each rank has looked at some files. A collective."""
        part = (dist.get_rank(), dist.get_world_size()) if is_shared() else (0, 1)
        return next((found for found in of_all_ranks(damage_of_folder(path, part)) if found), "")

    def said_by_first(self, own: str) -> str:
        """The words of rank 0, on all ranks, which wait for it as long as it takes. A collective.

        Args:
            own: Words; those of other ranks are not used.
        """
        heard = self._failures.say(own)
        return str(self.broadcast(own)) if heard is None else heard

    def hear_all(self, own: bytes) -> list[bytes]:
        """The words of all ranks on rank 0, which waits as long as it takes; nothing on others. A collective.

        Args:
            own: This rank's words.
        """
        heard = self._failures.hear(own)
        return of_all_ranks(own) if heard is None else heard

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        # Whoever removes a checkpoint believes that the one that should have replaced it is there.
        if self._has_failed or self._pending is not None:
            self._kept.append(filepath)
        else:
            super().remove_checkpoint(filepath)

    def _remove_kept(self, written: Any) -> None:
        for path in self._kept:
            if str(path) != str(written):
                super().remove_checkpoint(path)
        self._kept = []


def _words(error: Exception, path: Any) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    return (
        f"the checkpoint {path} could not be written: {type(error).__name__}: {error}. Write to another folder "
        "(ModelCheckpoint(dirpath=...)), or let training go on without it: on_save_error='warn'"
    )
