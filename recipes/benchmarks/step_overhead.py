# python recipes/benchmarks/step_overhead.py
# python recipes/benchmarks/step_overhead.py --rounds 40
# python recipes/benchmarks/step_overhead.py --accelerator cuda --ranks 8
"""What a step costs over a hand-written torch loop with the same wrapping, and over Lightning's own strategies.

The contenders take turns step by step; the table shows the median, over the rounds, of the ratio of two contenders'
steps in one round.
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
from contenders import (
    GPT,
    Module,
    ShardedByHand,
    Turns,
    set_up,
    shard,
    start_ranks,
    through_lightning,
    tokens,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lightning_parallel

LENGTH, BATCH = 64, 4
WARM_UP = 3
PAIRS = (
    ("fsdp_custom", "hand-written FSDP2"),
    ("ddp_custom", "hand-written DDP"),
    ("fsdp_custom", "Lightning ModelParallelStrategy"),
    ("ddp_custom", "Lightning DDPStrategy"),
)


def loader_of(steps: int) -> DataLoader[Any]:
    """Batches for `steps` on every rank; the strategies deal them out."""
    return DataLoader(tokens(steps * BATCH * dist.get_world_size(), LENGTH), batch_size=BATCH, shuffle=False)


def hand_written(turns: Turns, wrap: Callable[[nn.Module], nn.Module], device: torch.device, steps: int) -> None:
    """The loop that one would write without Lightning."""
    torch.manual_seed(0)
    model = wrap(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = loader_of(steps).dataset
    for (batch,) in DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False)):
        turns.pause()
        optimizer.zero_grad()
        loss = model(batch.to(device))
        loss.backward()
        optimizer.step()


def contenders(accelerator: str, device: torch.device, steps: int) -> dict[str, Callable[[Turns], None]]:
    """Name -> a function that trains, and pauses between steps."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))

    def fsdp(model: nn.Module) -> nn.Module:
        shard(model, mesh)
        return model

    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def train(strategy: Callable[[], Any], module: Callable[[], Module]) -> Callable[[Turns], None]:
        return lambda turns: through_lightning(turns, strategy(), module(), loader_of(steps), accelerator)

    return {
        "fsdp_custom": train(lambda: lightning_parallel.build_strategy("fsdp_custom"), Module),
        "hand-written FSDP2": lambda turns: hand_written(turns, fsdp, device, steps),
        "Lightning ModelParallelStrategy": train(lambda: ModelParallelStrategy(ranks, 1), ShardedByHand),
        "ddp_custom": train(lambda: lightning_parallel.build_strategy("ddp_custom"), Module),
        "hand-written DDP": lambda turns: hand_written(turns, ddp, device, steps),
        "Lightning DDPStrategy": train(lambda: DDPStrategy(gradient_as_bucket_view=True), Module),
    }


def measure(accelerator: str, rounds: int) -> None:
    """Run on one rank; rank 0 prints."""
    device = set_up(accelerator)
    turns = {name: Turns(run) for name, run in contenders(accelerator, device, WARM_UP + rounds + 2).items()}
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(1 + WARM_UP + rounds):  # the first turn is the set-up
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds[name].append(turns[name].step())
    if dist.get_rank() == 0:
        report({name: times[1 + WARM_UP :] for name, times in seconds.items()}, rounds)
    dist.barrier()
    os._exit(0)  # the contenders wait for a turn that does not come


def report(seconds: dict[str, list[float]], rounds: int) -> None:
    """The table of ratios."""
    count = sum(p.numel() for p in GPT().parameters())
    print(f"{count / 1e6:.1f} M parameters, {dist.get_world_size()} ranks, {rounds} rounds")
    print(f"{'':14} {'over':34} {'median ratio':>12} {'quarter':>8} {'quarter':>8}")
    for ours, theirs in PAIRS:
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"{ours:14} {theirs:34} {middle:12.3f} {low:8.3f} {high:8.3f}", flush=True)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv, options.ranks))
    measure(options.accelerator, options.rounds)


if __name__ == "__main__":
    main()
