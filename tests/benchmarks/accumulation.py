# python tests/benchmarks/accumulation.py
# python tests/benchmarks/accumulation.py --rounds 24 --accumulate 8
# python tests/benchmarks/accumulation.py --accelerator cuda --ranks 8
"""What gradient accumulation costs when gradients are reduced in every microstep, and when only in the last.

Contenders are `fsdp_custom` with ``accumulation_sync=every`` and ``last``, and Lightning's own FSDP2 strategy. They
take turns window by window; the table shows the median, over the rounds, of the ratio of two contenders' windows in one
round, and the collectives that one rank starts in a window. The batch is small, so that communication counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from contenders import Module, ShardedByHand, Turns, set_up, start_ranks, through_lightning, tokens
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import lightning_parallel

LENGTH, BATCH, WARM_UP = 16, 1, 3
LIGHTNING = "Lightning ModelParallelStrategy"
KINDS = ("all_gather", "reduce_scatter")


class Collectives(TorchDispatchMode):
    """Counts the collectives of this rank by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count `func` if it is a collective, and run it."""
        name = func.overloadpacket.__name__.replace("allgather", "all_gather")
        if func.namespace == "c10d":
            self.counts.update(kind for kind in KINDS if kind in name)
        return func(*args, **(kwargs or {}))


class Windows(Turns):
    """Takes turns a window at a time, and counts the collectives of one."""

    num_microsteps = 1

    def window(self) -> float:
        """Let the contender run a window; the seconds it took."""
        return sum(self.step() for _ in range(self.num_microsteps))


def contenders(accelerator: str, num_windows: int, accumulate: int) -> dict[str, Callable[[Turns], None]]:
    """Name -> a function that trains, and pauses before each microstep."""
    ranks = dist.get_world_size()

    def train(strategy: Callable[[], Any], module: Callable[[], Module]) -> Callable[[Turns], None]:
        dataset = tokens(num_windows * accumulate * BATCH * ranks, LENGTH)
        loader = DataLoader(dataset, batch_size=BATCH, shuffle=False)
        return lambda turns: through_lightning(
            turns, strategy(), module(), loader, accelerator, accumulate_grad_batches=accumulate
        )

    def ours(sync: str) -> Callable[[Turns], None]:
        return train(lambda: lightning_parallel.build_strategy(f"fsdp_custom:accumulation_sync={sync}"), Module)

    return {
        "last": ours("last"),
        "every": ours("every"),
        LIGHTNING: train(lambda: ModelParallelStrategy(ranks, 1), ShardedByHand),
    }


def measure(accelerator: str, rounds: int, accumulate: int) -> None:
    """Run on one rank; rank 0 prints."""
    set_up(accelerator)
    Windows.num_microsteps = accumulate
    runs = contenders(accelerator, WARM_UP + rounds + 3, accumulate)
    turns = {name: Windows(run) for name, run in runs.items()}
    names = list(turns)
    for contender in turns.values():
        contender.step()  # the first turn is the set-up, up to the first microstep
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(WARM_UP + rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds[name].append(turns[name].window())
    counts = {name: count(turns[name]) for name in names}
    if dist.get_rank() == 0:
        report({name: times[WARM_UP:] for name, times in seconds.items()}, counts, accumulate)
    dist.barrier()
    os._exit(0)  # the contenders wait for a turn that does not come


def count(turns: Windows) -> Counter[str]:
    """The collectives of one more window. A mode belongs to a thread, so the contender's own thread enters it."""
    mode = Collectives()
    turns.before_next(mode.__enter__)
    turns.window()
    turns.before_next(lambda: mode.__exit__(None, None, None))
    turns.step()
    return mode.counts


def report(seconds: dict[str, list[float]], counts: dict[str, Counter[str]], accumulate: int) -> None:
    """The table."""
    print(f"{dist.get_world_size()} ranks, windows of {accumulate} microsteps, {len(seconds['last'])} rounds")
    print(f"{'':34} {'over Lightning':>14} {'quarter':>8} {'quarter':>8} {'gathers':>8} {'reduce-scatters':>16}")
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[LIGHTNING], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        gathers, reduces = (counts[name][kind] for kind in KINDS)
        print(f"{name:34} {middle:14.3f} {low:8.3f} {high:8.3f} {gathers:8d} {reduces:16d}", flush=True)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--accumulate", type=int, default=4)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv, options.ranks))
    measure(options.accelerator, options.rounds, options.accumulate)


if __name__ == "__main__":
    main()
