# python tests/benchmarks/meter_overhead.py
# python tests/benchmarks/meter_overhead.py --rounds 40 --accelerator cuda
"""What the meters cost: trainers with and without them take turns in one process, a block of steps each.

Two tables. In the first, a step does nearly nothing, so that the CPU time which meters add to it can be measured to
some microseconds. In the second, a GPT with 10.8 M parameters trains: ratios compare two blocks of one round, in wall
time and in the CPU time of the thread that trains. Two trainers without meters show how much is noise. The last line is
of the thread with which `GpuMonitor` reads, once a second, which is not in the first table.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from contenders import GPT, Module, Turns, tokens
from lightning.pytorch.callbacks import Callback, DeviceStatsMonitor, ThroughputMonitor
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel.callbacks import Doctor, GpuMonitor, StepBreakdown, Throughput
from lightning_parallel.callbacks.host_process import open_process
from lightning_parallel.callbacks.nvml_device import UnavailableError

LENGTH, BATCH = 64, 4
BLOCK = 10  # steps of a turn; each callback logs once in as many
WARM_UP = 2
NOTHING, AGAIN = "nothing", "nothing, again"

Blocks = dict[str, list[tuple[float, float]]]
"""Contender -> seconds of wall time and of CPU time of its blocks."""


class Empty(L.LightningModule):
    """A step that does nearly nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A loss of one multiplication."""
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Silent(Logger):
    """Takes values and drops them."""

    name, version = "silent", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""


class PauseBlocks(Callback):
    """Gives the turn away behind each block, and notes the CPU time of each."""

    def __init__(self, turns: Turns, seconds: list[float]) -> None:
        self._turns, self._seconds, self._begin = turns, seconds, 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        """Another contender's turn, perhaps."""
        if batch_idx % BLOCK == 0:
            self._seconds.append(time.thread_time() - self._begin)
            self._turns.pause()
            self._begin = time.thread_time()


def all_meters() -> list[Callback]:
    """All callbacks that measure, as a user would have them."""
    return [
        Throughput(every=BLOCK, peak=1e12),
        StepBreakdown(every=BLOCK),
        Doctor(every=BLOCK, tries_workers=False),
        GpuMonitor(every=BLOCK),
    ]


def meters() -> dict[str, Callable[[], list[Callback]]]:
    """Name -> a function that builds callbacks."""
    found: dict[str, Callable[[], list[Callback]]] = {
        NOTHING: list,
        AGAIN: list,
        "Throughput": lambda: [Throughput(every=BLOCK, peak=1e12)],
        "StepBreakdown": lambda: [StepBreakdown(every=BLOCK)],
        "Doctor": lambda: [Doctor(every=BLOCK, tries_workers=False)],
        "GpuMonitor": lambda: [GpuMonitor(every=BLOCK)],
        "all four": all_meters,
        "ThroughputMonitor": lambda: [ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].size(1))],
    }
    if importlib.util.find_spec("psutil") is None:
        print("DeviceStatsMonitor is left out: it needs psutil, which is not installed\n")
    else:
        found["DeviceStatsMonitor"] = lambda: [DeviceStatsMonitor()]
    return found


def measure(
    made: dict[str, Callable[[], list[Callback]]],
    build: Callable[[], L.LightningModule],
    rounds: int,
    accelerator: str,
) -> Blocks:
    """Let trainers of the module that `build` makes take turns, each with its callbacks of `made`."""
    order = list(made)
    loader = DataLoader(tokens((WARM_UP + rounds + 3) * BLOCK * BATCH, LENGTH), batch_size=BATCH)
    cpu: dict[str, list[float]] = {name: [] for name in made}

    def train(name: str, turns: Turns) -> None:
        L.Trainer(
            accelerator=accelerator,
            devices=1,
            max_epochs=1,
            callbacks=[PauseBlocks(turns, cpu[name]), *made[name]()],
            logger=Silent(),
            log_every_n_steps=BLOCK,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(build(), loader)

    turns = {name: Turns(lambda own, name=name: train(name, own)) for name in made}  # type: ignore[misc]
    wall: dict[str, list[float]] = {name: [] for name in made}
    for index in range(1 + WARM_UP + rounds):  # the first turn is the set-up
        for name in order[index % len(order) :] + order[: index % len(order)]:
            wall[name].append(turns[name].step())
    return {name: list(zip(wall[name], cpu[name], strict=True))[1 + WARM_UP :] for name in made}


def quartiles(values: Sequence[float], form: str) -> str:
    """The median, and the quartiles in brackets."""
    low, middle, high = (format(each, form) for each in statistics.quantiles(values, n=4))
    return f"{middle} [{low}, {high}]"


def report_cost(blocks: Blocks) -> None:
    """Microseconds of CPU time of a step beyond those without meters."""
    print(f"{'':20} {'us of CPU time a step':>28}")
    without = [cpu for _, cpu in blocks[NOTHING]]
    for name, times in blocks.items():
        own = [cpu for _, cpu in times]
        added = own if name == NOTHING else [a - b for a, b in zip(own, without, strict=True)]
        print(f"{name:20} {quartiles([1e6 * each / BLOCK for each in added], '.0f'):>28}", flush=True)
    print("(nothing: the whole step; others: beyond that)\n")


def report_ratios(blocks: Blocks) -> None:
    """The ratio of blocks with meters and without."""
    wall, cpu = (statistics.median(each[place] for each in blocks[NOTHING]) / BLOCK for place in (0, 1))
    print(f"a step without meters: {1000 * wall:.0f} ms, of which {1000 * cpu:.0f} ms CPU time of its thread")
    print(f"{'':20} {'wall time':>28} {'CPU time':>28}")
    for name, times in blocks.items():
        if name != NOTHING:
            pairs = list(zip(times, blocks[NOTHING], strict=True))
            walls, cpus = ([a[place] / b[place] for a, b in pairs] for place in (0, 1))
            print(f"{name:20} {quartiles(walls, '.4f'):>28} {quartiles(cpus, '.4f'):>28}", flush=True)


def report_reading() -> None:
    """CPU time of a reading of `GpuMonitor`'s thread."""
    try:
        source = open_process()
    except UnavailableError as error:
        print(f"GpuMonitor: {error}")
        return
    seconds = []
    for _ in range(200):
        begin = time.thread_time()
        source.read()
        seconds.append(time.thread_time() - begin)
    print(f"a reading of GpuMonitor's thread: {quartiles([1e6 * each for each in seconds], '.0f')} us of CPU time")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    made = meters()
    report_cost(measure(made, Empty, 20 * options.rounds, options.accelerator))
    report_ratios(measure(made, lambda: Module(GPT), options.rounds, options.accelerator))
    report_reading()
    os._exit(0)  # the contenders wait for a turn that does not come


if __name__ == "__main__":
    main()
