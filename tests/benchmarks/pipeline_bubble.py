# python tests/benchmarks/pipeline_bubble.py
# python tests/benchmarks/pipeline_bubble.py --rounds 40 --microbatches 8 --only 1f1b interleaved
# python tests/benchmarks/pipeline_bubble.py --accelerator cuda --ranks 4
"""How much of a step the ranks of a pipeline wait for each other, against what the order of the schedule implies.

Measured: each schedule takes steps of M microbatches and of 2 M. While a pipeline is full, M microbatches more take the
time that it needs for them without waiting, whatever they cost in computing, sending and wrapping. So the share of a
step T(M) in which ranks wait is 1 - (T(2 M) - T(M)) / T(M). What a step costs apart from microbatches is in it; SGD is
the optimizer, as its update takes next to no time.

Ideal: the order of the schedule, carried out by ranks for which a layer's backward takes twice its forward and sending
takes no time. With P ranks and V stages a rank, that is (P - 1)/(V M + P - 1) for `gpipe`, `1f1b` and `interleaved`. In
`zbv` and `dualpipev`, too, a backward is one for inputs and weights together here, so that their ideal is not the
published one, which puts the weights off into what is idle.

Efficiency: the same microbatches also go through the whole model on one rank, by a loop that waits for nobody; P ranks
at that pace would take 1/P of its time. This is their share of the step, and everything else lowers it.

All of these take turns step by step, so that what else the machine does falls on all; the table shows the medians of
the rounds, and the quartiles of what was measured.
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
from lightning_parallel.techniques.pipeline.execution import training_actions
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan

LENGTH, WARM_UP = 64, 3
WHOLE = "whole"
Contender = tuple[str, int]
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
) -> dict[Contender, Callable[[Turns], None]]:
    """Name and number of microbatches -> a function that trains, and pauses between steps."""

    def loader(count: int) -> DataLoader[Any]:
        return DataLoader(tokens(steps * count, LENGTH), batch_size=count, shuffle=False)

    def ours(schedule: str, count: int) -> Callable[[Turns], None]:
        text = f"pp_custom:schedule={schedule},microbatches={count},virtual_stages={SCHEDULES[schedule]}"
        return lambda turns: through_lightning(
            turns, lightning_parallel.build_strategy(text), SGDModule(SplitGPT), loader(count), accelerator
        )

    counts = (microbatches, 2 * microbatches)
    return {
        (WHOLE, microbatches): lambda turns: whole(turns, loader(microbatches), device),
        **{(schedule, count): ours(schedule, count) for schedule in schedules for count in counts},
    }


def measure(options: argparse.Namespace) -> None:
    """Run on one rank; rank 0 prints."""
    device = set_up(options.accelerator)
    schedules = [name for name in SCHEDULES if not options.only or name in options.only]
    microbatches = options.microbatches or 2 * dist.get_world_size()
    runs = contenders(options.accelerator, device, schedules, microbatches, WARM_UP + options.rounds + 2)
    turns = {contender: Turns(run) for contender, run in runs.items()}
    order = list(turns)
    seconds: dict[Contender, list[float]] = {contender: [] for contender in order}
    for index in range(1 + WARM_UP + options.rounds):  # the first turn is the set-up
        for contender in order[index % len(order) :] + order[: index % len(order)]:
            dist.barrier()
            seconds[contender].append(turns[contender].step())
    if dist.get_rank() == 0:
        report({contender: times[1 + WARM_UP :] for contender, times in seconds.items()}, schedules, microbatches)
    dist.barrier()
    os._exit(0)  # the contenders wait for a turn that does not come


def report(seconds: dict[Contender, list[float]], schedules: list[str], microbatches: int) -> None:
    """The table."""
    ranks, alone = dist.get_world_size(), seconds[WHOLE, microbatches]
    print(f"{ranks} ranks, {microbatches} microbatches, {len(alone)} rounds")
    print(f"{'':12} {'ideal':>8} {'measured':>9} {'quarter':>8} {'quarter':>8} {'efficiency':>11}")
    for name in schedules:
        steps, long_steps = seconds[name, microbatches], seconds[name, 2 * microbatches]
        waits = [2 - long / step for step, long in zip(steps, long_steps, strict=True)]
        low, middle, high = statistics.quantiles(waits, n=4)
        efficiency = statistics.median(one / (ranks * step) for one, step in zip(alone, steps, strict=True))
        best = ideal(name, ranks, microbatches)
        print(f"{name:12} {best:8.3f} {middle:9.3f} {low:8.3f} {high:8.3f} {efficiency:11.3f}", flush=True)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--microbatches", type=int, help="of the shorter steps; twice the ranks, if not given")
    parser.add_argument("--only", nargs="*", choices=tuple(SCHEDULES), help="schedules that are wanted")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv, options.ranks))
    measure(options)


if __name__ == "__main__":
    main()
