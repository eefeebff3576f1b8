"""A recipe that is to run on another machine: what can be found out about it, and refused, on this one."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Trainer
from typing_extensions import override

from lightning_parallel.cli.explain import degrees_in_words
from lightning_parallel.cli.recipe_cli import RecipeCLI
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.launch.command import Command
from lightning_parallel.launch.job import Folder
from lightning_parallel.presets import build_strategy, split_items
from lightning_parallel.strategies.data_parallel import DataParallelStrategy
from lightning_parallel.strategies.planned_strategy import PlannedStrategy

_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "GROUP_", "ROLE_", "PL_", "OMPI_", "PMI_", "PET_")
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_OWN_ARGUMENTS = ("model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders")
_CALLBACK, _LOGS = "ModelCheckpoint", "lightning_logs"


@dataclass
class LaunchedRecipe:
    """The words of a recipe on the run.

    Args:
        violations: Reasons why it cannot run on as many ranks.
        is_on_host: Whether ranks are to compute on the CPU.
        root: The Trainer's `default_root_dir`, if it is given.
        folders: Where checkpoints are written; ``None`` if nobody has looked, and none if nothing is saved.
        degrees: The degrees in words, of a strategy that has some.
    """

    violations: list[str] = field(default_factory=list)
    is_on_host: bool = False
    root: str | None = None
    folders: list[Folder] | None = None
    degrees: str = ""


def read_recipe(command: Command, *, nodes: int, devices: int, builds: bool) -> LaunchedRecipe:
    """Read a recipe as its command would, and check it for a cluster, on the CPU and in this process.

    Args:
        command: The command, with the recipe.
        nodes: The number of machines.
        devices: The number of ranks on each.
        builds: Whether its module is built and looked at; else its strategy and its degrees are.
    """
    found = LaunchedRecipe()
    options = [f"--{name}" for name in inspect.signature(getattr(Trainer, command.name)).parameters]
    arguments = command.without(tuple(option for option in options if option[2:] not in _OWN_ARGUMENTS))[1:]
    try:
        with _alone():
            cli = _ElsewhereCLI(found, arguments, nodes=nodes, devices=devices, builds=builds)
            strategy: Any = cli.trainer.strategy
            if isinstance(strategy, DataParallelStrategy) and nodes * devices > 1:
                found.violations.append(_ONE_PROCESS.format(nodes * devices))
            elif isinstance(strategy, PlannedStrategy):
                found.degrees = degrees_in_words(strategy.degrees)
                if builds:
                    strategy.check_module(cli.model)
    except ConfigurationError as error:
        found.violations.extend(error.violations)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        found.violations.append(
            f"the recipe cannot be read and built on this machine ({reason}); mend that, or give --check=degrees, "
            "which builds no module, or --check=none"
        )
    return found


class _ElsewhereCLI(RecipeCLI):
    """Reads a recipe for devices that this machine may lack: its ranks are on the host here.

    Args:
        found: What it finds is noted there.
        args: The recipe's arguments.
        nodes: The number of machines.
        devices: The number of ranks on each.
        builds: Whether the module and its data are built.
    """

    def __init__(self, found: LaunchedRecipe, args: list[str], *, nodes: int, devices: int, builds: bool) -> None:
        self._found, self._builds = found, builds
        shape = {"accelerator": "cpu", "devices": devices, "num_nodes": nodes, "sync_batchnorm": False}
        super().__init__(shape, args=args, callbacks=[])

    @override
    def before_instantiate_classes(self) -> None:
        trainer = self._get(self.config, "trainer")
        self._found.is_on_host = trainer.get("accelerator") == "cpu"
        root = trainer.get("default_root_dir")
        self._found.root = None if root is None else str(root)
        self._found.folders = _folders(trainer, self._found.root or ".")
        if trainer.get("precision") in ("16-mixed", "16", 16):
            trainer["precision"] = "bf16-mixed"
        if isinstance(text := self._get(self.config, "strategy"), str):
            self.config["strategy"] = _on_host(text)
        given = trainer.get("strategy")
        if not isinstance(given, str | None) and (init_args := given.get("init_args")) is not None:
            _without_hardware(init_args)
        super().before_instantiate_classes()
        if not self._builds:
            for name in ("model", "data"):
                self.config.pop(name, None)


def _on_host(text: str) -> str:
    """The string of a strategy without what a GPU alone can do; refused first, where its values are none."""
    name, colon, given = text.partition(":")
    if not colon:
        return text
    build_strategy(text)
    options = dict(item.split("=", 1) for item in split_items(given))
    _without_hardware(options)
    return ":".join([name, *filter(None, [",".join(f"{option}={value}" for option, value in options.items())])])


def _without_hardware(options: Any) -> None:
    """Leave out, or emulate, what this machine may lack and the cluster may have."""
    if options.get("process_group_backend") not in (None, "gloo"):
        options.pop("process_group_backend")
    float8 = options.get("float8")
    if float8 in (None, "none") or ":" in float8:
        return
    if importlib.util.find_spec("torchao") is None:
        options.pop("float8")
    else:
        options["float8"] = f"{float8}:emulate"


def _folders(trainer: Any, root: str) -> list[Folder]:
    """Where the callbacks of a Trainer's arguments write checkpoints."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    given = [
        each.get("init_args") or {}
        for each in callbacks
        if str(each.get("class_path", "")).rpartition(".")[2].endswith(_CALLBACK)
    ]
    if not given and trainer.get("enable_checkpointing") is not False:
        given = [{}]
    found = [_folder(trainer.get("logger"), each.get("dirpath"), root) for each in given]
    return list(dict.fromkeys(found))


def _folder(logger: Any, dirpath: Any, root: str) -> Folder:
    """Where one of them writes: the callback's folder, else the logger's, whose version may be another each time."""
    if dirpath is not None:
        return Folder(str(dirpath))
    if logger is False:
        return Folder(os.path.join(root, "checkpoints"))  # noqa: PTH118 - it may be a URL
    logger = logger[0] if isinstance(logger, list) and logger else logger
    options = {} if logger in (None, True) or isinstance(logger, list) else logger.get("init_args") or {}
    save_dir = options.get("save_dir") or root
    has_version = any(options.get(name) is not None for name in ("version", "id"))
    return Folder(os.path.join(str(save_dir), str(options.get("name") or _LOGS)), is_lasting=has_version)  # noqa: PTH118


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Hide the launcher around this process, such as an allocation of SLURM, and keep the terminal for the result."""
    hidden = {name: os.environ[name] for name in os.environ if name.startswith(_OF_LAUNCHERS) or name in _OF_RANKS}
    disabled, given = logging.root.manager.disable, sys.argv
    for name in hidden:
        del os.environ[name]
    logging.disable(logging.INFO)
    sys.argv = sys.argv[:1]  # Lightning's CLI warns of arguments that it is not given
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(disabled)
        sys.argv = given
        os.environ.update(hidden)


_ONE_PROCESS = (
    "dp_custom is one process over the devices of a machine, and a cluster would start {}; give ddp_custom, or run "
    "lightning-parallel fit on the machine itself"
)
