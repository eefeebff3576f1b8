"""The command ``lightning-parallel``."""

from __future__ import annotations

import inspect
import json
import os
import sys
import warnings
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from lightning_parallel.cli.devices import visible_devices
from lightning_parallel.cli.explain import explain
from lightning_parallel.cli.lightning_cli import LightningCLI, is_first_process
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.presets import PRESETS
from lightning_parallel.strategies.process_group import ProcessGroupStrategy

_USAGE = """\
usage: lightning-parallel COMMAND [options]

  fit | validate | test | predict   run a recipe: --config recipe.yaml --strategy=NAME:option=value,...
  verify                            a recipe under its strategy against one process, on the CPU
  explain                           what a recipe's strategy would do to each layer; the options of fit
  strategies                        the names that --strategy takes, and the options of each
  devices                           the accelerators of this machine

lightning-parallel fit --help lists the options of a command.
"""
_REFUSED = 2
_RETIRING = r"(?s).*(JsonargparseDeprecationWarning|was deprecated in v4\.)"


def main() -> None:
    """Run the command line; a set-up that is refused prints its reasons once and exits with status 2."""
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    if command in ("", "-h", "--help"):
        print(_USAGE, end="")
    elif command == "strategies":
        print(describe_strategies(), end="")
    elif command == "devices":
        print("\n".join(visible_devices() or ["no accelerator; the host can be used (--trainer.accelerator=cpu)"]))
    else:
        # A recipe names its module by import path, seen from the folder in which the command is given.
        sys.path.insert(0, os.getcwd())  # noqa: PTH109 - the interpreter's path holds strings
        # Lightning's CLI calls jsonargparse by a name that is being retired; the user of the command can't change that.
        warnings.filterwarnings("ignore", message=_RETIRING)
        try:
            if command == "explain":
                _explain()
            elif command == "verify":
                from lightning_parallel.cli.verify import verify

                sys.exit(verify(sys.argv[2:]))
            else:
                LightningCLI(save_config_callback=_SaveConfigBesideLogs)
        except ConfigurationError as error:
            if is_first_process():
                print(f"lightning-parallel: {error}", file=sys.stderr)
            sys.exit(_REFUSED)


def _explain() -> None:
    """Build the Trainer and the module of a recipe, and say what `fit` would do with them."""
    del sys.argv[1]  # the rest are options, not a command
    parsed = LightningCLI(run=False, save_config_callback=None)
    print(explain(parsed.trainer, parsed.model))
    if isinstance(strategy := parsed.trainer.strategy, ProcessGroupStrategy):
        strategy.check_module(parsed.model)


class _SaveConfigBesideLogs(SaveConfigCallback):
    """Without a logger, Lightning would write ``config.yaml`` into the working directory, over the user's own."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def describe_strategies() -> str:
    """The names with a line each, and their options with types and defaults."""
    lines = []
    for name, preset in PRESETS.items():
        lines.append(f"{name:<20} {preset.summary}")
        for option, parameter in preset.options.items():
            annotation = inspect.formatannotation(parameter.annotation).strip("'\"")
            default = parameter.default
            default = int(default.total_seconds()) if isinstance(default, timedelta) else default
            lines.append(f"    {f'{option}={_as_yaml(default)}':<32} {annotation}")
    return "\n".join([*lines, ""])


def _as_yaml(default: Any) -> str:
    """As it would be given in the string of a strategy."""
    return default if isinstance(default, str) else json.dumps(default)
