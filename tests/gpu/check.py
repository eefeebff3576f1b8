# python -m tests.gpu.check                        all sections, one rank on the first GPU
# python -m tests.gpu.check parity rng --ranks 2   two ranks, which share the GPU by gloo if there is only one
# python -m tests.gpu.check --accelerator cpu --ranks 2
"""Checks for a machine with a GPU: memory, synchronisation, time, numbers, kernels, compiling.

Each thing that is checked is a line of JSON: its name, value, limit, and whether it is ok. The exit status is 1 if one
is not. A section is meant to take less than ten minutes (not run on a GPU yet). With ``--accelerator cpu`` it does
what it can there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.contenders import start_ranks
from tests.gpu import costs, numbers
from tests.gpu.machine import Check, Machine
from tests.quiet import silence

SECTIONS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    "setup": costs.setup,
    "syncs": costs.syncs,
    "step": costs.step,
    "parity": numbers.parity,
    "rng": numbers.rng,
    "host": costs.host,
    "kernels": numbers.kernels,
    "compile": numbers.compile,
}


def checks_of(section: str, machine: Machine) -> Iterator[Check]:
    """Its checks; an error is one that has failed, and ends the section."""
    try:
        yield from SECTIONS[section](machine)
    except Exception as error:
        yield Check(section, why=f"{type(error).__name__}: {error}"[:2000], has_failed=True)


def run(section: str, machine: Machine, out: Path | None) -> int:
    """Run a section on this rank; the number of checks that are not ok."""
    silence()
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if machine.has_gpu and not machine.is_shared else "gloo")
    failures = 0
    for check in checks_of(section, machine):
        failures += check.ok is False
        if dist.get_rank() == 0 or check.has_failed:
            print(check.to_json(), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(check.to_json() + "\n")
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks of each section in turn, or be one; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file to which the lines are added")
    options = parser.parse_args(arguments)
    if unknown := [section for section in options.sections if section not in SECTIONS]:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --accelerator cpu runs what a CPU can")
    is_shared = options.accelerator == "cuda" and options.ranks > torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:
        failures = run(options.sections[0], Machine(options.accelerator, options.ranks, is_shared), options.out)
        sys.stdout.flush()
        os._exit(1 if failures else 0)  # contenders wait for a turn that does not come
    status = 0
    for section in options.sections:
        command = ["-m", "tests.gpu.check", section, "--accelerator", options.accelerator]
        command += ["--ranks", str(options.ranks), *(["--out", str(options.out)] if options.out else [])]
        status |= start_ranks(command, options.ranks)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
