"""Lightning's tests that start ranks, on the CPU: ours in the place of its DDP, and each rank runs the test alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities import testing

DEADLINE = 240
"""Seconds for a test, of which each process takes some to import."""
WAIT = 60
"""Seconds in which further ranks end after the first one."""
GPUS, DDP = ("gpu", "cuda"), "ddp"
METHODS = {"": "popen", "spawn": "spawn", "fork": "fork", "notebook": "fork"}
"""Lightning's suffix of DDP -> the method that starts ranks."""

current: list[str] = []
"""The test that runs, last."""
started: list[subprocess.Popen[bytes]] = []
"""Processes of further ranks of the test that runs."""


def is_further_rank() -> bool:
    """Whether this process was started by a test, for one of its ranks."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def start_ranks(options: Sequence[str], named: Callable[[str, Any], Any]) -> None:
    """Let tests start ranks, all on the CPU.

    Args:
        options: Of pytest, without paths.
        named: The method that starts ranks, and Lightning's DDP as the test gives it -> what the Trainer is given.
    """
    reasons = testing._runif_reasons
    # Tests of two GPUs run on two processes of the CPU; what asks for the GPU itself fails under stock DDP, too.
    testing._runif_reasons = lambda min_cuda_gpus=0, standalone=False, **kwargs: reasons(**kwargs)
    connect = _AcceleratorConnector.__init__

    def on_the_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("accelerator") in GPUS:
            kwargs["accelerator"] = "cpu"
            if isinstance(kwargs.get("devices"), list):
                kwargs["devices"] = len(kwargs["devices"])
        given = kwargs.get("strategy")
        if (method := method_of(given)) is not None:
            kwargs["strategy"] = named(method, given)
        connect(self, *args, **kwargs)

    _AcceleratorConnector.__init__ = on_the_cpu
    observe = subprocess_script._launch_process_observer

    def note(processes: list[subprocess.Popen[bytes]]) -> None:
        started.extend(processes)
        observe(processes)

    subprocess_script._launch_process_observer = note
    subprocess_script._basic_subprocess_cmd = lambda: [sys.executable, "-m", "pytest", *options, current[-1]]


def method_of(strategy: Any) -> str | None:
    """How Lightning's DDP would start ranks, or None where `strategy` is another one."""
    if type(strategy) is DDPStrategy:
        return strategy._start_method
    name = str(strategy).partition("_find_unused_parameters")[0]
    return METHODS.get(name.removeprefix(DDP).removeprefix("_")) if name.startswith(DDP) else None


def ended(errors: Path) -> str:
    """Wait for further ranks, and say what failed there.

    Args:
        errors: Where they have noted it.
    """
    processes, started[:] = list(started), []
    codes = []
    for process in processes:
        try:
            codes.append(process.wait(WAIT))
        except subprocess.TimeoutExpired:
            process.kill()
            codes.append(process.wait())
    said = errors.read_text() if errors.exists() else ""
    errors.unlink(missing_ok=True)
    return f"a further rank ended with {codes}: {said}" if any(codes) or said else ""
