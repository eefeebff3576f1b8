"""The commands of ``lightning-parallel``, and how they end."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback
from typing_extensions import override

from lightning_parallel.cli.devices import visible_devices
from lightning_parallel.cli.explain import explain
from lightning_parallel.cli.lightning_cli import LightningCLI, is_first_process
from lightning_parallel.errors import CheckpointError, ConfigurationError, FirstStepError, check, line_of_error
from lightning_parallel.presets import PRESETS, Preset, register, unknown_name
from lightning_parallel.strategies.failures import FirstFailure, first_failure
from lightning_parallel.strategies.process_group import ProcessGroupStrategy

_INDENT = " " * 8
_REFUSED = 2
_RETIRING = r"(?s).*(JsonargparseDeprecationWarning|was deprecated in v4\.)"


def run(command: str) -> None:
    """Run a command with the arguments behind it; one that is refused, or fails, ends with its reason in one place.

    Args:
        command: The first argument of the command line.
    """
    register()
    # A recipe names its module by import path, seen from the folder in which the command is given.
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - the interpreter's path holds strings
    # Lightning's CLI calls jsonargparse by a name that is being retired; the user of the command can't change that.
    warnings.filterwarnings("ignore", message=_RETIRING)
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\)")  # once a rank, from Lightning
    for name in ("pytorch.utilities.rank_zero", "fabric.strategies.launchers.subprocess_script"):
        logging.getLogger(f"lightning.{name}").addFilter(_is_news)
    try:
        _answer(command)
    except (ConfigurationError, FirstStepError, CheckpointError) as error:
        first = first_failure(error)
        # All raise the latter two, and rank 0 has the words; of the others, each that says something else is heard.
        if first is None or not isinstance(error, ConfigurationError):
            is_heard = is_first_process()
        else:
            is_heard = first.is_here or not first.says(error)
        if is_heard:
            print(f"lightning-parallel: {error}", file=sys.stderr)
        sys.exit(_REFUSED)
    except Exception as error:
        first = first_failure(error)
        if first is None:
            raise
        _tell_failure(error, first)
        sys.exit(1)


def _answer(command: str) -> None:
    if command == "strategies":
        print(describe_strategies(sys.argv[2:]), end="")
    elif command == "devices":
        print("\n".join(visible_devices() or ["no accelerator; the host can be used (--trainer.accelerator=cpu)"]))
    elif command == "explain":
        _explain()
    elif command == "verify":
        from lightning_parallel.cli.verify import verify

        sys.exit(verify(sys.argv[2:]))
    elif command == "doctor":
        from lightning_parallel.cli.doctor import doctor

        sys.exit(doctor(sys.argv[2:]))
    elif command == "report":
        from lightning_parallel.cli.report import report

        sys.exit(report(sys.argv[2:]))
    elif command == "bench":
        from lightning_parallel.cli.bench import bench

        sys.exit(bench(sys.argv[2:]))
    elif command == "launch":
        from lightning_parallel.cli.launch import launch

        sys.exit(launch(sys.argv[2:]))
    elif command == "inspect":
        from lightning_parallel.cli.inspect_checkpoint import inspect as inspect_checkpoint

        sys.exit(inspect_checkpoint(sys.argv[2:]))
    elif command == "completion":
        from lightning_parallel.cli.completion import completion

        sys.exit(completion(sys.argv[2:]))
    elif command == "export":
        from lightning_parallel.cli.export import export

        sys.exit(export(sys.argv[2:]))
    else:
        LightningCLI(save_config_callback=_SaveConfigBesideLogs)


def _tell_failure(error: Exception, first: FirstFailure) -> None:
    """The traceback of the rank that failed first, and nothing of those that failed because of it but one line."""
    if first.is_here:
        traceback.print_exception(error)
        line = line_of_error(error)
        print(f"lightning-parallel: {first.text}{f' ({line})' if line else ''}", file=sys.stderr)
    elif os.environ.get("LOCAL_RANK", "0") == "0":  # once a machine: the other one may write into another file
        print(f"lightning-parallel: this machine's ranks end because {first.text}", file=sys.stderr)


def _explain() -> None:
    """Build the Trainer and the module of a recipe, and say what `fit` would do with them."""
    del sys.argv[1]  # the rest are options, not a command
    parser = {"prog": "lightning-parallel explain", "description": "What fit would do with a recipe's module."}
    parsed = LightningCLI(run=False, save_config_callback=None, parser_kwargs=parser)
    print(explain(parsed.trainer, parsed.model))
    if isinstance(strategy := parsed.trainer.strategy, ProcessGroupStrategy):
        strategy.check_module(parsed.model)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line is more than Lightning's advice to install another product, or the end of a rank that said why.

    Lightning ends the first rank when another one has ended. Exit status 1 is that of a rank that has said its error.
    """
    text = record.getMessage()
    return "Tip: For seamless cloud" not in text and "terminated with code 1. Forcefully" not in text


class _SaveConfigBesideLogs(SaveConfigCallback):
    """Without a logger, Lightning would write ``config.yaml`` into the working directory, over the user's own."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


def describe_strategies(names: Sequence[str] = ()) -> str:
    """The names with a line each, and their options with types and defaults.

    Args:
        names: Only these, with the meaning of each option; all if there are none.

    Raises:
        ConfigurationError: If a name is unknown.
    """
    check(unknown_name(name) for name in names if name not in PRESETS)
    lines = []
    for name in names or PRESETS:
        preset = PRESETS[name]
        lines.append(f"{name:<20} {preset.summary}")
        meanings = _meanings(preset) if names else {}
        for option, parameter in preset.options.items():
            annotation = inspect.formatannotation(parameter.annotation).strip("'\"")
            default = parameter.default
            default = int(default.total_seconds()) if isinstance(default, timedelta) else default
            lines.append(f"    {f'{option}={_as_yaml(default)}':<32} {annotation}")
            lines += textwrap.wrap(meanings.get(option, ""), 100, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return "\n".join([*lines, ""])


def _meanings(preset: Preset) -> dict[str, str]:
    """Option -> what the class's documentation says of it, without the marks of code."""
    sections = (inspect.getdoc(preset.build) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", sections, flags=re.MULTILINE)
    return {name: " ".join(re.sub(r":class:|`", "", text).split()) for name, text in found}


def _as_yaml(default: Any) -> str:
    """As it would be given in the string of a strategy."""
    return default if isinstance(default, str) else json.dumps(default)
