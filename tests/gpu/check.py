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
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from tests.benchmarks.contenders import start_ranks
from tests.gpu import costs, features, numbers
from tests.gpu.machine import Check, Machine, tried
from tests.quiet import silence

SECTIONS: dict[str, Callable[[Machine], Iterator[Check]]] = {
    "setup": costs.setup,
    "syncs": costs.syncs,
    # A process each: torch 2.11 ends in a segmentation fault where several threads compile.
    "step_ddp": functools.partial(costs.step, wrapping="ddp", compiles=False),
    "step_fsdp": functools.partial(costs.step, wrapping="fsdp", compiles=False),
    "step_ddp_compiled": functools.partial(costs.step, wrapping="ddp", compiles=True),
    "step_fsdp_compiled": functools.partial(costs.step, wrapping="fsdp", compiles=True),
    "parity": numbers.parity,
    "rng": numbers.rng,
    "host": costs.host,
    "kernels": numbers.kernels,
    "compile": numbers.compile,
    "evaluate": features.evaluate,
    "memory": features.memory,
    "float8": features.float8,
    "callbacks": features.callbacks,
    "first": features.first,
}


def checks_of(section: str, machine: Machine) -> Iterator[Check]:
    """Its checks, and what was warned of meanwhile on a GPU, where more is said than the tests know."""
    silence()
    with warnings.catch_warnings(record=machine.has_gpu) as said:
        if machine.has_gpu:
            warnings.simplefilter("always")
        yield from tried(section, lambda: SECTIONS[section](machine))
    messages = dict.fromkeys(f"{each.category.__name__}: {each.message}"[:300] for each in said or ())
    if messages:
        yield Check(f"{section}/warnings", len(messages), why=" | ".join(messages)[:4000])


def run(section: str, machine: Machine, out: Path | None) -> int:
    """Run a section on this rank; the number of checks that are not ok."""
    torch.set_num_threads(1)
    if machine.has_gpu:
        torch.cuda.set_device(machine.device)
    is_nccl = machine.has_gpu and not machine.is_shared
    dist.init_process_group("nccl" if is_nccl else "gloo", device_id=machine.device if is_nccl else None)
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
    parser.add_argument("--only", nargs="*", default=[], help="names that are wanted, such as tp_custom")
    parser.add_argument("--out", type=Path, help="a file to which the lines are added")
    options = parser.parse_args(arguments)
    if unknown := [section for section in options.sections if section not in SECTIONS]:
        parser.error(f"there is no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    if options.accelerator == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --accelerator cpu runs what a CPU can")
    is_shared = options.accelerator == "cuda" and options.ranks > torch.cuda.device_count()
    if "LOCAL_RANK" in os.environ:
        machine = Machine(options.accelerator, options.ranks, is_shared, tuple(options.only))
        failures = run(options.sections[0], machine, options.out)
        sys.stdout.flush()
        os._exit(1 if failures else 0)  # contenders wait for a turn that does not come
    status = 0
    for section in options.sections:
        command = ["-m", "tests.gpu.check", section, "--accelerator", options.accelerator]
        command += ["--ranks", str(options.ranks), *(["--out", str(options.out)] if options.out else [])]
        command += ["--only", *options.only]
        status |= start_ranks(command, options.ranks)
    return int(status != 0)


if __name__ == "__main__":
    sys.exit(main())
