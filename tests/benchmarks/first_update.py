# python tests/benchmarks/first_update.py
# python tests/benchmarks/first_update.py --rounds 8 --only tp_custom pp_custom
# python tests/benchmarks/first_update.py --checks default
"""The time from `Trainer.fit` to the end of the first update, with the first step compared to one process and without.

Fits with each value of `check` take turns in the same ranks, and with them one step of one process: the plain model's
forward, backward and update on the batch that a rank reads. The table shows the medians over the rounds, and what the
comparison adds in such steps. `default` gives no `check`, as versions before it need it.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from contenders import GPT, Module, SplitGPT, set_up, start_ranks, synchronize, tokens
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

import lightning_parallel

LENGTH, BATCH = 64, 8
NAMES = (
    "ddp_custom",
    "zero1_custom",
    "zero2_custom",
    "fsdp_custom",
    "hsdp_custom",
    "cp_custom",
    "tp_custom",
    "pp_custom",
)
SHARED = ("cp_custom", "tp_custom", "pp_custom")
"""Names under which all ranks read the same samples."""


class FirstUpdate(Callback):
    """The time when the first update is done."""

    at = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        """The update is part of the batch."""
        synchronize()
        self.at = time.perf_counter()


def seconds_to_update(name: str, check: str, loader: DataLoader[Any], accelerator: str) -> float:
    """A fit of one step; the seconds from its call to the end of its update."""
    text = name if check == "default" else f"{name}:check={check}"
    module = Module(SplitGPT if name in SHARED else GPT)
    first = FirstUpdate()
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        strategy=lightning_parallel.build_strategy(text),
        max_steps=1,
        callbacks=[first],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    start = started()
    trainer.fit(module, loader)
    return first.at - start


def seconds_of_a_step(name: str, batch: int, device: torch.device) -> float:
    """One step of one process on `batch` samples."""
    module = Module(SplitGPT if name in SHARED else GPT).to(device)
    optimizer = module.configure_optimizers()
    (samples,) = next(iter(DataLoader(tokens(batch, LENGTH), batch_size=batch)))
    start = started()
    module.training_step([samples.to(device)], 0).backward()
    optimizer.step()
    synchronize()
    return time.perf_counter() - start


def started() -> float:
    """The time when all ranks begin, with nothing left of what was before."""
    gc.collect()
    dist.barrier()
    return time.perf_counter()


def measure(options: argparse.Namespace) -> None:
    """Run on one rank; rank 0 prints."""
    device = set_up(options.accelerator)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.rounds} rounds; seconds")
        print(f"{'':14}", *(f"{check:>12}" for check in options.checks), f"{'a step':>12} {'in steps':>9}")
    for name in options.only or NAMES:
        batch = BATCH if name in SHARED else BATCH // dist.get_world_size()
        loader = DataLoader(tokens(BATCH, LENGTH), batch_size=batch, shuffle=False)
        found: dict[str, list[float]] = {check: [] for check in [*options.checks, "step"]}
        for index in range(1 + options.rounds):  # the first one warms up
            for check in options.checks[:: 1 if index % 2 else -1]:
                found[check].append(seconds_to_update(name, check, loader, options.accelerator))
            found["step"].append(seconds_of_a_step(name, batch, device))
        if dist.get_rank() == 0:
            report(name, {key: values[1:] for key, values in found.items()}, options.checks)
    dist.destroy_process_group()


def report(name: str, seconds: dict[str, list[float]], checks: list[str]) -> None:
    """A line of the table."""
    medians = [statistics.median(seconds[check]) for check in [*checks, "step"]]
    pairs = zip(seconds[checks[0]], seconds[checks[-1]], seconds["step"], strict=True)
    added = statistics.median((last - first) / step for first, last, step in pairs)
    print(f"{name:14}", *(f"{value:12.3f}" for value in medians), f"{added:9.2f}", flush=True)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--checks", nargs="+", default=["off", "auto"], help="values of `check` that take turns")
    parser.add_argument("--only", nargs="*", help="names whose rows are wanted, such as tp_custom")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv, options.ranks))
    measure(options)


if __name__ == "__main__":
    main()
