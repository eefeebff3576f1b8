"""The command ``verify``: a recipe under a strategy on ranks of the CPU, against one process."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_parallel.errors import check
from lightning_parallel.verification.certificate import DIFFERS, Certificate, Finding
from lightning_parallel.verification.comparison import compare
from lightning_parallel.verification.records import Record, load_records

_TAIL = 30
"""Lines of a run's output that are shown when it fails."""
_RANKS_PER_CORE = 4
_REFUSED = 2


def verify(arguments: list[str]) -> int:
    """Train a recipe for a few updates under its strategy and in one process, and print how far they are apart.

    Both runs are processes of their own, on the CPU, in fp64 unless told otherwise, without the recipe's loggers and
    checkpoints.

    Args:
        arguments: Those of ``fit``, and the options of `_parser`.

    Returns:
        The exit status: 0 if all that was compared is equal, 1 if something differs, 2 if the set-up is refused.
    """
    options, recipe = build_parser().parse_known_args(arguments)
    check(_violations(options))
    with tempfile.TemporaryDirectory(prefix="lightning_parallel_verify_") as temporary:
        folder = Path(temporary)
        arguments = [temporary, str(options.ranks), str(options.updates), options.precision]
        status = _run(["parallel", *arguments], recipe)
        records = load_records(folder)
        if status == _REFUSED:
            print(f"lightning-parallel: {_error(folder)}", file=sys.stderr)
            return _REFUSED
        if status != 0:
            return _report(options, records, [_ended(folder, "the run under the strategy")])
        if _run(["reference", *arguments], recipe) != 0:
            return _report(options, records, [_ended(folder, "the run in one process")])
        (reference,) = load_records(folder / "reference")
        return _report(options, records, compare(records, reference, options.tolerance))


def build_parser() -> argparse.ArgumentParser:
    """Build what reads the options; those that it does not know are the recipe's."""
    parser = argparse.ArgumentParser(
        prog="lightning-parallel verify",
        description="Compare a recipe under its strategy with one process, on the CPU; the other options are fit's.",
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default 2)")
    parser.add_argument("--updates", type=int, default=3, help="number of updates of both runs (default 3)")
    parser.add_argument("--precision", default="64-true", help="precision of both runs (default 64-true)")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="largest relative difference (default 1e-5)")
    parser.add_argument("--certificate", type=Path, default=None, help="a file for the result, in JSON")
    return parser


def _violations(options: argparse.Namespace) -> list[str]:
    cores = os.cpu_count() or 1
    most = _RANKS_PER_CORE * cores
    violations = []
    if not 1 <= options.ranks <= most:
        violations.append(f"--ranks={options.ranks}: this machine has {cores} cores; give 1 to {most} ranks")
    if options.updates < 1:
        violations.append(f"--updates={options.updates}: give 1 or more; 2 and more compare a resumed run, too")
    if not (math.isfinite(options.tolerance) and options.tolerance > 0):
        violations.append(f"--tolerance={options.tolerance} is no distance; give a number above 0, such as 1e-5")
    if options.certificate is not None and not options.certificate.absolute().parent.is_dir():
        violations.append(
            f"--certificate={options.certificate}: there is no folder {options.certificate.parent}; make it, or give "
            "another path"
        )
    return violations


def _run(arguments: list[str], recipe: list[str]) -> int:
    """Run one of the two, its output in a file; what it said is shown if it fails."""
    command = [sys.executable, "-m", "lightning_parallel.cli.verified_run", *arguments, *recipe]
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with (Path(arguments[1]) / f"{arguments[0]}.log").open("w+") as log:
        status = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        log.seek(0)
        if status not in (0, _REFUSED):
            print("".join(log.readlines()[-_TAIL:]), end="", file=sys.stderr)
    return status


def _ended(folder: Path, which: str) -> Finding:
    return Finding("training", DIFFERS, f"{which} ended: {_error(folder)}")


def _error(folder: Path) -> str:
    path = folder / "error.json"
    return json.loads(path.read_text()) if path.exists() else "without an error of its first rank; see its output above"


def _report(options: argparse.Namespace, records: list[Record], findings: list[Finding]) -> int:
    certificate = Certificate(
        strategy=records[0].strategy if records else "the strategy",
        num_ranks=options.ranks,
        num_readers=records[0].num_readers if records else 1,
        num_updates=max(0, len(records[0].weights) - 1) if records else 0,
        precision=options.precision,
        tolerance=options.tolerance,
        findings=tuple(findings),
    )
    print(certificate.to_text())
    if options.certificate is not None:
        options.certificate.write_text(certificate.to_json() + "\n")
    return 0 if certificate.has_passed else 1
