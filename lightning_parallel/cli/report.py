"""The command ``report``: one page of HTML from the logs of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_parallel.errors import check
from lightning_parallel.report.page import build_page
from lightning_parallel.report.runs import CSV_NAME, read_runs


def report(arguments: list[str]) -> int:
    """Write a page with what the loggers of runs have in their files; several runs are compared.

    Args:
        arguments: The options of `_parser`.

    Returns:
        The exit status, which is 0.

    Raises:
        ConfigurationError: If there are no logs, or no folder for the page.
    """
    options = build_parser().parse_args(arguments)
    path: Path = options.out or options.folders[0] / "report.html"
    check(_violations(options.folders, path))
    runs = read_runs(options.folders)
    check(_no_runs(options.folders) if not runs else ())
    title = options.title or (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    path.write_text(build_page(runs, title), encoding="utf-8")
    print(f"lightning-parallel: {len(runs)} run{'s' if len(runs) > 1 else ''} in {path}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel report",
        description="Write a page of HTML from what CSV and TensorBoard loggers have written; runs are compared.",
        allow_abbrev=False,
    )
    parser.add_argument("folders", type=Path, nargs="+", metavar="RUN_DIR", help="a folder of a run, or of several")
    parser.add_argument("--out", type=Path, help="the page to write (default RUN_DIR/report.html)")
    parser.add_argument("--title", default="", help="its heading (default: the run's name)")
    return parser


def _violations(folders: Sequence[Path], path: Path) -> list[str]:
    found = [f"{folder} is no folder; give the folder of a run" for folder in folders if not folder.is_dir()]
    if not found and not path.absolute().parent.is_dir():
        found.append(f"--out={path}: there is no folder {path.parent}; make it, or give another path")
    return found


def _no_runs(folders: Sequence[Path]) -> list[str]:
    return [
        f"no logged values are in {' or '.join(map(str, folders))}: there is no {CSV_NAME} and no event file of "
        "TensorBoard with scalars; give a folder that a CSVLogger or TensorBoardLogger has written, and other loggers "
        "keep their values elsewhere"
    ]
