"""The command ``doctor``: some steps of a recipe, and a report of where their time goes and what holds them up."""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

from lightning.pytorch.callbacks import EarlyStopping

from lightning_parallel.callbacks import Doctor, StepBreakdown, Throughput
from lightning_parallel.callbacks.metered_steps import MeteredWindow
from lightning_parallel.cli.doctor_report import Examination, can_draw, draw
from lightning_parallel.cli.recipe_cli import RecipeCLI
from lightning_parallel.errors import check

_FEWEST = 5
"""Steps of which a window is one: the first one and the profiled one do not count."""
_WINDOWS = 3


class _ExaminedCLI(RecipeCLI):
    """A recipe's trainer, module and data, without meters of its own, and with nothing that could stop it."""

    left_out = (*RecipeCLI.left_out, EarlyStopping, Doctor, StepBreakdown, Throughput)


def doctor(arguments: list[str]) -> int:
    """Train a recipe for some steps, and write a report in Markdown, and a picture where matplotlib is there.

    Nothing is validated, logged or saved. Ranks are those of ``fit``.

    Args:
        arguments: Those of ``fit``, and the options of `_parser`.

    Returns:
        The exit status, which is 0.
    """
    options, recipe = build_parser().parse_known_args(arguments)
    check(_violations(options))
    every = max(1, (options.steps - 2) // _WINDOWS)
    look, rates = Doctor(every=every), Throughput(every=every)
    windows: list[MeteredWindow] = []
    look.listeners.append(lambda trainer, window: windows.append(window))
    overrides = {"max_steps": options.steps, "max_epochs": -1, "limit_val_batches": 0}
    with warnings.catch_warnings():
        # Other ranks are started with the command line, so it has to stay as it is.
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        cli = _ExaminedCLI(overrides, args=recipe, callbacks=[look, rates])
    given = cli.config.get("strategy") or cli.config["trainer"].get("strategy")
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    if cli.trainer.is_global_zero:
        found = Examination(
            strategy=given if isinstance(given, str) else type(cli.trainer.strategy).__name__,
            windows=windows,
            verdicts=look.said,
            exposed=look.exposed,
            rates=rates.latest,
        )
        picture = options.report.with_suffix(".png") if can_draw() and windows else None
        if picture is not None:
            draw(windows, picture)
        options.report.write_text(found.to_markdown("" if picture is None else picture.name))
        print(f"lightning-parallel: the report is in {options.report}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options; those that it does not know are the recipe's."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel doctor",
        description="Train a recipe for some steps and write where their time goes; the other options are fit's.",
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=30, help="updates to train (default 30)")
    parser.add_argument("--report", type=Path, default=Path("doctor.md"), help="the file to write (default doctor.md)")
    return parser


def _violations(options: argparse.Namespace) -> list[str]:
    violations = []
    if options.steps < _FEWEST:
        violations.append(f"--steps={options.steps} are too few to tell anything; give {_FEWEST} or more, such as 30")
    if not options.report.absolute().parent.is_dir():
        violations.append(
            f"--report={options.report}: there is no folder {options.report.parent}; make it, or give another path"
        )
    return violations
