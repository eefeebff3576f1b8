"""``lightning-parallel completion``: a script by which a shell completes commands, options, names and files."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_parallel.cli import bench_options, doctor, export, inspect_checkpoint, launch_options, report, verify
from lightning_parallel.cli.lightning_cli import LightningCLI
from lightning_parallel.errors import check
from lightning_parallel.presets import PRESETS

_OF_FIT = {"verify": verify, "doctor": doctor, "bench": bench_options}
"""Commands that take the options of ``fit``, too."""
_OF_NO_RECIPE = {"inspect": inspect_checkpoint, "export": export, "report": report, "launch": launch_options}
SHELLS = ("bash", "zsh")
_BASH = """
# bash takes --option=value apart at the sign, which the function above does not know; and other words may be files
_lightning_parallel() {
  local word words=() past=0 index=0
  for word in "${COMP_WORDS[@]}"; do
    if [[ $word == "=" ]] && (( index == COMP_CWORD )); then words+=("")
    elif [[ $word == "=" ]]; then past=$((past + (index < COMP_CWORD)))
    else words+=("$word"); fi
    index=$((index + 1))
  done
  COMP_WORDS=("${words[@]}") COMP_CWORD=$((COMP_CWORD - past))
  _shtab_lightning_parallel "$1" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
}
complete -o bashdefault -o default -F _lightning_parallel lightning-parallel"""


def completion(args: list[str]) -> int:
    """Print the script for a shell; it has all that is known now, and imports nothing when it is used.

    Args:
        args: The arguments behind the command.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: If shtab, which writes it, is missing.
    """
    shell = build_parser().parse_args(args).shell
    if importlib.util.find_spec("shtab") is None:
        check(["completion needs shtab, which is not installed; pip install shtab"])
    import shtab

    print(shtab.complete(_all_commands(shtab.FILE), shell) + (_BASH if shell == "bash" else ""))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel completion",
        description="A script by which a shell completes commands, options, strategies and files.",
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell")
    return parser


def _all_commands(file: Any) -> argparse.ArgumentParser:
    """One parser of all commands; it is looked at, and parses nothing.

    Args:
        file: What marks a value as a file.
    """
    whole = argparse.ArgumentParser(prog="lightning-parallel")
    whole.add_argument("--version", action="store_true", help="the versions")
    commands = whole.add_subparsers()
    recipes = dict(_of_recipes())
    of_recipes = {name: [parser] for name, parser in recipes.items()}
    of_recipes["explain"] = [recipes["fit"]]
    of_recipes |= {name: [recipes["fit"], module.build_parser()] for name, module in _OF_FIT.items()}
    for name, parents in of_recipes.items():
        parser = commands.add_parser(name, parents=parents, add_help=False, conflict_handler="resolve", help=name)
        parser.add_argument("--strategy", choices=sorted(PRESETS), help="the parallelism")
        for option in ("--config", "--ckpt_path"):
            parser.add_argument(option, help="a file").complete = file  # type: ignore[attr-defined]
    for name, module in _OF_NO_RECIPE.items():
        parser = commands.add_parser(
            name, parents=[module.build_parser()], add_help=False, conflict_handler="resolve", help=name
        )
        if module is launch_options:
            parser.add_argument("--on", choices=tuple(launch_options.SUBMITTING), help="what starts the ranks")
    commands.add_parser("completion", parents=[build_parser()], add_help=False, help="completion")
    commands.add_parser("strategies", help="strategies").add_argument("name", nargs="?", choices=sorted(PRESETS))
    commands.add_parser("devices", help="devices")
    return whole


class _BuiltError(Exception):
    """Parsers are built, and nothing is to be parsed."""


class _Parsers(LightningCLI):
    """The parsers of the commands that are Lightning's."""

    def __init__(self) -> None:
        self.found: list[LightningArgumentParser] = []
        with suppress(_BuiltError):
            super().__init__(args=[], save_config_callback=None)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self.found.append(parser)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        raise _BuiltError


def _of_recipes() -> Iterator[tuple[str, LightningArgumentParser]]:
    found = _Parsers()
    yield from zip(found.subcommands(), found.found, strict=True)
