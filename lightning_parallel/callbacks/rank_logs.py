"""`RankLogs`: the output of each rank in a file of its own, and that of rank 0 on the screen."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch import Callback
from typing_extensions import override

from lightning_parallel.callbacks.meter_log import MeterLog
from lightning_parallel.callbacks.screen_output import Screen
from lightning_parallel.callbacks.strategy_protocol import refuse

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class RankLogs(Callback):
    """Write what each rank prints into ``ranks/rank0.log`` and so on, below the folder of the run.

    Rank 0 prints on the screen as before; of the others, nothing is on it while the trainer runs. A file has prints,
    warnings, lines of loggers, and the traceback of an error, by which it is seen later what each rank did. Of ranks
    other than 0 it also has what libraries such as NCCL print by themselves. A run that resumes in the same folder adds
    to the files.

    Args:
        folder: In place of ``ranks`` in the folder of the logger (`Trainer.log_dir`), or in `default_root_dir` where
            there is none.

    Attributes:
        path: The file of this rank, once there is one.

    Raises:
        ConfigurationError: If the run's folder is not on a disk.

    Example:
        >>> Trainer(strategy="fsdp_custom", callbacks=[RankLogs()])
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.path: Path | None = None
        self._folder = None if folder is None else Path(folder)
        self._log = MeterLog("RankLogs")
        self._screen: Screen | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._screen is not None:
            return
        folder = self._folder or Path(self._of_run(trainer)) / "ranks"
        self.path = folder / f"rank{trainer.global_rank}.log"
        try:
            self._screen = Screen(self.path, is_shown=trainer.is_global_zero)
        except OSError as error:
            print(f"RankLogs: rank {trainer.global_rank} prints on the screen: {error}", file=sys.stderr)
        self._log.say(f"the output of each rank is in {folder}")

    def _of_run(self, trainer: Trainer) -> str:
        """The folder of the run. A collective."""
        found = trainer.log_dir
        folder = str(found) if isinstance(found, str | Path) else trainer.default_root_dir
        refuse(trainer, [f"RankLogs writes no files to {folder}; give folder=, on a disk"] if "://" in folder else [])
        return folder

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._screen is not None and not self._screen.file.closed:
            traceback.print_exception(exception, file=self._screen.file)
        self._close()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None
