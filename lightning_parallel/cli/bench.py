"""The command ``bench``: a recipe under several strategies on several numbers of devices, in turn."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lightning_parallel.bench import picture
from lightning_parallel.bench.cells import Cell, Run, cells_of, runs_in_turn
from lightning_parallel.bench.machine import digests, machine, num_cores, versions
from lightning_parallel.bench.processes import ENDED, RAN, run_ranks
from lightning_parallel.bench.progress import Progress
from lightning_parallel.bench.results import Result, Results, result_of
from lightning_parallel.bench.rows import Row, row_violations, rows_in
from lightning_parallel.bench.stopwatch import Timing
from lightning_parallel.bench.table import as_text
from lightning_parallel.cli.bench_options import build_parser, numbers_in, option_violations
from lightning_parallel.cli.benched_run import Recipe, check_recipe, run_rank
from lightning_parallel.errors import check

_JSON, _PICTURES, _LOGS = "bench.json", ("bench.svg", "bench.png"), "logs"
_INTERRUPTED = 130


@dataclass(frozen=True)
class _Plan:
    """Everything that the options say.

    Args:
        rows: The rows.
        devices: The numbers of devices.
        scaling: ``"weak"``, ``"strong"`` or ``"both"``.
        repeats: Runs of each cell.
        timeout: Seconds of a run.
        output: The folder.
        recipe: The recipe.
    """

    rows: tuple[Row, ...]
    devices: tuple[int, ...]
    scaling: str
    repeats: int
    timeout: float
    output: Path
    recipe: Recipe

    @property
    def cells(self) -> list[Cell]:
        """All cells."""
        return cells_of([row.name for row in self.rows], self.devices, self.scaling)


def bench(arguments: list[str]) -> int:
    """Measure a recipe under each strategy in turn, and print, write and draw what was found.

    Args:
        arguments: The options of `build_parser`, and those of ``fit``.

    Returns:
        The exit status: 0 if at least one row ran, 1 if none did, 130 if it was interrupted. A set-up that is refused
        raises, and the command ends with 2.
    """
    options, recipe = build_parser().parse_known_args(arguments)
    plan = _plan(options, recipe)
    accelerator = check_recipe(plan.recipe, max(plan.devices))
    plan.output.mkdir(parents=True, exist_ok=True)
    results = Results(plan.output / _JSON, _fixed(plan), arguments)
    results.load()
    _say_cores(plan, accelerator)
    try:
        _measure(plan, results)
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from {plan.output / _JSON}", file=sys.stderr)
        return _INTERRUPTED
    return _report(plan, results)


def _plan(options: argparse.Namespace, recipe: list[str]) -> _Plan:
    """The options as they are meant.

    Raises:
        ConfigurationError: With everything that is wrong with them.
    """
    rows, devices, violations = rows_in(options.strategies), numbers_in(options.devices), option_violations(options)
    check([*row_violations(rows), *violations])
    timing = Timing(options.warm_up, options.steps)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return _Plan(
        tuple(rows),
        tuple(devices or ()),
        options.scaling,
        options.repeats,
        options.timeout,
        options.output,
        Recipe(tuple(recipe), timing, int(threads) if threads.isdecimal() else 1),
    )


def _fixed(plan: _Plan) -> dict[str, object]:
    """The parts of a set-up without which results cannot stand in one table."""
    recipe = plan.recipe
    return {
        "recipe": {"arguments": list(recipe.arguments), "sha256": digests(recipe.arguments)},
        "steps": {"warm_up": recipe.timing.warm_up, "timed": recipe.timing.steps, "threads": recipe.threads},
        "versions": versions(),
        "machine": machine(),
    }


def _say_cores(plan: _Plan, accelerator: str) -> None:
    """Say once on which cores the ranks will be, and what won't be drawn."""
    on_host = accelerator == "cpu" or (accelerator == "auto" and not machine()["accelerators"])
    if on_host and max(plan.devices) > num_cores():
        text = f"{max(plan.devices)} ranks share {num_cores()} cores: their times say nothing of as many devices"
        print(f"lightning-parallel: {text}", file=sys.stderr)
    if not picture.can_draw():
        text = "no picture: matplotlib is missing, which comes with the extra bench (the table and JSON need none)"
        print(f"lightning-parallel: {text}", file=sys.stderr)


def _measure(plan: _Plan, results: Results) -> None:
    """Run everything that has no result yet; a cell that can't run is tried once."""
    cells = plan.cells
    runs = [run for run in runs_in_turn(cells, plan.repeats) if not results.has(run)]
    with Progress(plan.repeats) as progress:
        for number, run in enumerate(runs):
            if not results.has(run):
                progress.begin(run, number, [each for each in runs[number:] if not results.has(each)])
                results.add(_run(plan, run))
                progress.end(run)
                results.save(cells)
    results.save(cells)


def _run(plan: _Plan, run: Run) -> Result:
    cell = run.cell
    num_ranks = 1 if Row(cell.row).is_one_process else cell.devices
    arguments = (cell, plan.recipe)
    ending = run_ranks(run_rank, arguments, num_ranks, timeout=plan.timeout, num_threads=plan.recipe.threads)
    if ending.log and ending.outcome in (RAN, ENDED):
        folder = plan.output / _LOGS
        folder.mkdir(exist_ok=True)
        (folder / f"{cell.title.replace(' ', '_').replace(':', '_')}.log").write_text(ending.log)
    return result_of(run, ending)


def _report(plan: _Plan, results: Results) -> int:
    summaries = results.summaries(plan.cells)
    print(as_text(summaries))
    ran = [summary for summary in summaries if summary.outcome == RAN]
    written = [_JSON]
    if ran and picture.can_draw():
        picture.draw(summaries, [plan.output / name for name in _PICTURES])
        written += _PICTURES
    print(f"written to {plan.output}: {', '.join(written)}")
    if any(summary.outcome == ENDED for summary in summaries):
        print(f"what ended with an error has printed: {plan.output / _LOGS}")
    return 0 if ran else 1
