# python recipes/benchmarks/pipeline_bubble.py
# python recipes/benchmarks/pipeline_bubble.py --rounds 24 --microbatches 8 --only 1f1b interleaved
# python recipes/benchmarks/pipeline_bubble.py --accelerator cuda --ranks 4 --microbatches 8 16
"""How much of a step the ranks of a pipeline idle, measured against what the order of the schedule implies.

Measured: the same microbatches also go through the whole model on one rank, by a loop that waits for nobody. P ranks
that never waited would take 1/P of that time, so a step that takes T idles for 1 - T(whole)/(P T) of it. Besides the
wait for other ranks, this contains what it costs to send, receive and cut batches. Whole model and schedules take turns
step by step, and the table shows the median of the rounds. SGD is the optimizer, as its update takes next to no time.

Ideal: the order of the schedule, carried out by ranks for which a layer's backward takes twice its forward and sending
takes no time. With P ranks, M microbatches and V stages a rank, that is (P - 1)/(V M + P - 1) for `gpipe`, `1f1b` and
`interleaved`. In `zbv` and `dualpipev`, too, a backward is one for inputs and weights together here, so that their
ideal is not the published one, which puts the weights off into what is idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from contenders import Module, SplitGPT, Turns, set_up, start_ranks, through_lightning, tokens
from torch.utils.data import DataLoader
from typing_extensions import override

import lightning_parallel
from lightning_parallel.stages import StagePlan
from lightning_parallel.techniques.pipeline.execution import training_actions
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy

LENGTH, WARM_UP = 64, 3
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}
"""Schedule -> stages a rank."""
UNITS = {"F": 1, "B": 2, "I": 2}
"""What is computed -> how long it takes; `I` is where a V-schedule puts a backward, the weights' included."""


class SGDModule(Module):
    """The module as a user writes it, with an update that takes next to no time."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def whole(turns: Turns, loader: DataLoader[Any], device: torch.device) -> None:
    """The whole model on this rank alone, a sample at a time."""
    model = SplitGPT().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for (batch,) in loader:
        turns.pause()
        optimizer.zero_grad()
        for microbatch in batch.to(device).split(1):
            (model(microbatch) / len(batch)).backward()
        optimizer.step()


def ideal(schedule: str, ranks: int, microbatches: int) -> float:
    """The share of a step in which the ranks idle, if sending takes no time."""
    policy = PipelinePolicy(schedule=schedule, virtual_stages=SCHEDULES[schedule])
    plan = StagePlan(ranks, tuple(range(1, ranks * SCHEDULES[schedule] + 1)), policy.is_v)
    orders = [
        [action for action in training_actions(policy, plan, microbatches, rank) if action.kind in UNITS]
        for rank in range(ranks)
    ]
    work = sum(UNITS[action.kind] for order in orders for action in order)
    ends: dict[tuple[bool, int, int], int] = {}  # (is a forward, stage, microbatch) -> when it is done
    clocks = [0] * ranks
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                action = order[0]
                is_forward = action.kind == "F"
                neighbour = action.stage - 1 if is_forward else action.stage + 1
                before = (is_forward, neighbour, action.microbatch)
                if 0 <= neighbour <= plan.last and before not in ends:
                    break
                clocks[rank] = max(clocks[rank], ends.get(before, 0)) + UNITS[action.kind]
                ends[is_forward, action.stage, action.microbatch] = clocks[rank]
                order.pop(0)
    return 1 - work / (ranks * max(clocks))


def contenders(
    accelerator: str, device: torch.device, schedules: list[str], microbatches: int, steps: int
) -> dict[str, Callable[[Turns], None]]:
    """Name -> a function that trains, and pauses between steps."""
    loader = DataLoader(tokens(steps * microbatches, LENGTH), batch_size=microbatches, shuffle=False)

    def ours(schedule: str) -> Callable[[Turns], None]:
        virtual = f",virtual_stages={SCHEDULES[schedule]}" if SCHEDULES[schedule] > 1 else ""
        text = f"pp_custom:schedule={schedule},microbatches={microbatches}{virtual}"
        return lambda turns: through_lightning(
            turns, lightning_parallel.build_strategy(text), SGDModule(SplitGPT), loader, accelerator
        )

    return {"whole": lambda turns: whole(turns, loader, device), **{name: ours(name) for name in schedules}}


def measure(options: argparse.Namespace) -> None:
    """Run on one rank; rank 0 prints."""
    device = set_up(options.accelerator)
    schedules = [name for name in SCHEDULES if not options.only or name in options.only]
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {options.rounds} rounds; idle share of a step")
        print(f"{'':12} {'microbatches':>12} {'ideal':>8} {'measured':>9} {'quarter':>8} {'quarter':>8}", flush=True)
    for microbatches in options.microbatches:
        runs = contenders(options.accelerator, device, schedules, microbatches, WARM_UP + options.rounds + 1)
        turns = {name: Turns(run) for name, run in runs.items()}
        names = list(turns)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for index in range(1 + WARM_UP + options.rounds):  # the first turn is the set-up
            for name in names[index % len(names) :] + names[: index % len(names)]:
                dist.barrier()
                seconds[name].append(turns[name].step())
        for contender in turns.values():
            contender.step()  # to the end of training
        if dist.get_rank() == 0:
            report({name: times[1 + WARM_UP :] for name, times in seconds.items()}, microbatches)
    dist.barrier()
    os._exit(0)  # what Lightning starts at exit would wait for other threads


def report(seconds: dict[str, list[float]], microbatches: int) -> None:
    """The rows of the table."""
    ranks = dist.get_world_size()
    for name in list(seconds)[1:]:
        idle = [1 - alone / (ranks * step) for alone, step in zip(seconds["whole"], seconds[name], strict=True)]
        low, middle, high = statistics.quantiles(idle, n=4)
        best = ideal(name, ranks, microbatches)
        print(f"{name:12} {microbatches:12} {best:8.3f} {middle:9.3f} {low:8.3f} {high:8.3f}", flush=True)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--only", nargs="*", choices=tuple(SCHEDULES), help="schedules that are wanted")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv, options.ranks))
    measure(options)


if __name__ == "__main__":
    main()
