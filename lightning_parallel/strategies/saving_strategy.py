"""Strategies whose checkpoints are there whole or not at all; why one could not be written is said on all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.errors import CheckpointError
from lightning_parallel.strategies.checkpoint_files import CheckpointFiles, readable
from lightning_parallel.strategies.failures import FailureWatch
from lightning_parallel.strategies.refusing_strategy import RefusingStrategy

_ON_SAVE_ERROR = ("raise", "warn")


@dataclass(frozen=True)
class Endings:
    """The ways in which a run ends.

    Args:
        on_save_error: Where a checkpoint cannot be written, ``"raise"`` ends the run, ``"warn"`` goes on without it.
        stop_status: Exit status of a run that a signal has ended.
    """

    on_save_error: str = "raise"
    stop_status: int = 143

    @property
    def violations(self) -> list[str]:
        """The reasons why values are none, in words."""
        found = []
        if self.on_save_error not in _ON_SAVE_ERROR:
            found.append(f"on_save_error={self.on_save_error!r} is unknown; possible: {', '.join(_ON_SAVE_ERROR)}")
        if not 0 <= self.stop_status <= 255:
            found.append(f"stop_status={self.stop_status} is no exit status; possible: 0 to 255")
        return found


class SavingStrategy(RefusingStrategy):
    """Writes checkpoints from rank 0.

    Args:
        endings: What is to happen where that fails.
    """

    def __init__(self, endings: Endings) -> None:
        super().__init__()
        self._endings = endings
        self._failures = FailureWatch()
        self._has_failed = False
        self._kept: list[Any] = []

    @override
    def set_up_violations(self) -> list[str]:
        return [*super().set_up_violations(), *self._endings.violations]

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
        cause: Exception | None = None
        if self.is_global_zero:
            try:
                super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            except Exception as error:
                cause = error
        problem = self._said_by_first("" if cause is None else _words(cause, filepath))
        self._has_failed = bool(problem)
        if not problem:
            self._remove_kept(filepath)
        elif self._endings.on_save_error == "raise":
            raise CheckpointError(problem) from cause
        else:
            rank_zero_warn(f"{problem}. Training goes on, as on_save_error='warn' says")

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        options = {} if weights_only is None else {"weights_only": weights_only}  # Lightning's, since 2.6
        # Rank 0 looks at the file for all: each would have to read it once more.
        read, words, problem = checkpoint_path, "", ""
        if self.is_global_zero:
            try:
                read, words = readable(checkpoint_path)
            except CheckpointError as error:
                problem = str(error)
        chosen, problem = self._said_by_first(f"{read if words else ''}\n{problem}").split("\n", 1)
        if problem:
            raise CheckpointError(problem)
        if words:
            rank_zero_warn(words)
        return super().load_checkpoint(chosen or checkpoint_path, **options)

    def _said_by_first(self, own: str) -> str:
        """The words of rank 0, on all ranks. A collective."""
        heard = self._failures.say(own)
        return str(self.broadcast(own)) if heard is None else heard

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        # Whoever removes a checkpoint believes that the one that should have replaced it is there.
        if self._has_failed:
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
