"""The options of ``bench``, without imports that take time, so that their help is there at once."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_parallel.bench.cells import SCALINGS


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options; those that it does not know are the recipe's."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel bench",
        description="Measure a recipe under several strategies, which take turns; the other options are fit's.",
        allow_abbrev=False,
    )
    names = "names with commas, options behind them: this package's (all for each), lightning:ddp, ..., and loop"
    parser.add_argument("--strategies", required=True, metavar="A,B:option=value,...", help=names)
    parser.add_argument("--devices", required=True, metavar="1,2,4", help="numbers of devices")
    scaling = "what grows with devices: weak, the global batch; strong, nothing; both (the default)"
    parser.add_argument("--scaling", default="both", metavar="weak|strong|both", help=scaling)
    parser.add_argument("--warm-up", type=int, default=5, help="steps before those that are timed (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="steps that are timed, in each repeat (default 20)")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each strategy (default 5)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one run may take (default 600)")
    folder = "a folder for the results, and to go on from (default bench_results)"
    parser.add_argument("--output", type=Path, default=Path("bench_results"), help=folder)
    return parser


def option_violations(options: argparse.Namespace) -> list[str]:
    """Everything that is wrong with the values, at once."""
    violations = []
    if numbers_in(options.devices) is None:
        violations.append(
            f"--devices={options.devices} are no numbers of devices; give some of 1 or more, such as 1,2,4"
        )
    if options.scaling not in SCALINGS:
        violations.append(f"--scaling={options.scaling} is unknown; possible: {', '.join(SCALINGS)}")
    for name in ("steps", "repeats"):
        if (value := getattr(options, name)) < 1:
            violations.append(f"--{name}={value}: give 1 or more")
    if options.warm_up < 1:
        violations.append(f"--warm-up={options.warm_up}: give 1 or more; the first step is longer than others")
    if not options.timeout > 0:
        violations.append(f"--timeout={options.timeout} is no time; give a number of seconds above 0")
    if options.output.exists() and not options.output.is_dir():
        violations.append(f"--output={options.output} is a file; give a folder")
    return violations


def numbers_in(text: str) -> list[int] | None:
    """Numbers of devices, smallest first; ``None`` if they are none."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    is_right = bool(parts) and all(part.isdecimal() and int(part) > 0 for part in parts)
    return sorted({int(part) for part in parts}) if is_right else None
