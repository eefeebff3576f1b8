"""One rank of one run of ``bench``: the recipe under one row, timed."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import accelerator
from typing_extensions import override

from lightning_parallel.bench.cells import Cell
from lightning_parallel.bench.loop import LoopSettings, train_loop
from lightning_parallel.bench.processes import Rank
from lightning_parallel.bench.rows import Row
from lightning_parallel.bench.stopwatch import Stopwatch, Timing
from lightning_parallel.bench.trained import TimedSteps, size_batches
from lightning_parallel.cli.recipe_cli import RecipeCLI
from lightning_parallel.errors import ConfigurationError, check
from lightning_parallel.presets import register

_EPOCHS = 1000
"""More than any run takes; a schedule is given a number all the same."""


@dataclass(frozen=True)
class Recipe:
    """A recipe and how it is run.

    Args:
        arguments: Those of `fit`.
        timing: The steps.
        threads: Threads of a rank.
    """

    arguments: tuple[str, ...]
    timing: Timing
    threads: int


class BenchedCLI(RecipeCLI):
    """A recipe's trainer, module and data, under one row.

    Args:
        row: The row; ``None`` only to look whether the recipe is one.
        rank: The rank that this process is.
        overrides: Arguments of the Trainer.
        args: The recipe's arguments.
        callbacks: More callbacks.
    """

    left_out = (*RecipeCLI.left_out, EarlyStopping)  # nothing is evaluated that could stop it

    def __init__(
        self, row: Row | None, rank: Rank | None, overrides: dict[str, Any], *, args: list[str], callbacks: list[Any]
    ) -> None:
        self._row, self._rank = row, rank
        super().__init__(overrides, args=args, callbacks=callbacks)

    @override
    def before_instantiate_classes(self) -> None:
        self.config["strategy"], self._get(self.config, "trainer")["strategy"] = None, "auto"
        super().before_instantiate_classes()

    @override
    def instantiate_classes(self) -> None:
        if self._row is not None:
            super().instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        assert self._row is not None
        assert self._rank is not None
        if self._row.is_loop:
            given = self._get(self.config_init, "trainer")
            return LoopSettings(given, rank=self._rank.number, size=self._rank.size)  # type: ignore[return-value]
        return super().instantiate_trainer(strategy=self._row.strategy(), **kwargs)


def check_recipe(recipe: Recipe, devices: int) -> str:
    """Read a recipe as each rank will, and build nothing.

    Args:
        recipe: The recipe.
        devices: The largest number of devices.

    Returns:
        The accelerator that the recipe asks for.

    Raises:
        ConfigurationError: If this machine does not have the devices. Of what is no recipe, the parser tells, and ends
            the command.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's parser would have no other arguments on the command line
        args = [*recipe.arguments, "--seed_everything=false"]  # nothing is drawn here
        cli = BenchedCLI(None, None, _overrides(devices), args=args, callbacks=[])
    return str(cli.config["trainer"]["accelerator"])


def run_rank(rank: Rank, cell: Cell, recipe: Recipe) -> None:
    """Train the recipe in one cell until all is measured, and hand the result over.

    Args:
        rank: The rank that this process is.
        cell: The cell.
        recipe: The recipe.
    """
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - the interpreter's path holds strings
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.WARNING)
    register()
    torch.set_num_threads(recipe.threads)
    row, watch = Row(cell.row), Stopwatch(recipe.timing, lambda measured: rank.hand_over(measured.to_plain()))
    overrides = _overrides(cell.devices) | {"default_root_dir": str(rank.folder)}
    callbacks = [] if row.is_loop else [TimedSteps(watch)]
    cli = BenchedCLI(row, rank, overrides, args=list(recipe.arguments), callbacks=callbacks)
    if row.is_loop:
        watch.device = _join(rank, str(cli.config["trainer"]["accelerator"]))
        settings: Any = cli.trainer
        train_loop(cli.model, cli.datamodule, settings, watch=watch, global_batches=cell.batches)
    else:
        is_host = row.is_one_process and cli.trainer.strategy.root_device.type == "cpu" and cell.devices > 1
        check([_ONE_HOST.format(cell.devices)] if is_host else [])
        size_batches(cli.model, cli.datamodule, cell.batches)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    if watch.measured is None or watch.measured.collectives is None:
        raise ConfigurationError([_SHORT.format(recipe.timing.total)])
    rank.hand_over(watch.measured.to_plain())


_ONE_HOST = "the host is one device to dp_custom, so {} devices of it would be one; give GPUs, or --devices=1"
_SHORT = "the recipe ends before {} steps are done; give less --steps and --warm-up, or a longer recipe"


def _overrides(devices: int) -> dict[str, Any]:
    """Arguments of the Trainer: training goes on until all is measured, and nothing else is done in between."""
    return {"devices": devices, "max_steps": -1, "max_epochs": _EPOCHS, "limit_val_batches": 0}


def _join(rank: Rank, given: str) -> torch.device:
    """This rank's device, in a process group with the others, as a loop by hand would begin."""
    found = accelerator.current_accelerator() if given != "cpu" and accelerator.is_available() else None
    device = torch.device("cpu") if found is None else torch.device(found.type, rank.number)
    if device.type != "cpu":
        accelerator.set_device_index(rank.number)
    if rank.size > 1:
        dist.init_process_group(device_id=None if device.type == "cpu" else device)
    return device
