# python tests/benchmarks/step_overhead.py
# python tests/benchmarks/step_overhead.py --rounds 40 --only tp_custom pp_custom
# python tests/benchmarks/step_overhead.py --accelerator cuda --ranks 8
"""What a step costs over a hand-written torch loop with the same wrapping, and over Lightning's own strategies.

The contenders take turns step by step, and ranks wait for each other before a turn; the table shows the median, over
the rounds, of the ratio of two contenders' steps in one round. Steps are timed on the first rank: in a pipeline, the
one that ends last.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from contenders import (
    GPT,
    Module,
    ShardedByHand,
    SplitGPT,
    StageByHand,
    Turns,
    loss_of,
    set_up,
    shard,
    split_by_hand,
    start_ranks,
    through_lightning,
    tokens,
)
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lightning_parallel

LENGTH, BATCH = 64, 4
MICROBATCHES = 2  # a stage, of one sample each
WARM_UP = 3
PAIRS = (
    ("fsdp_custom", "hand-written FSDP2"),
    ("ddp_custom", "hand-written DDP"),
    ("tp_custom", "hand-written tensor parallel"),
    ("pp_custom", "hand-written pipeline"),
    ("fsdp_custom", "Lightning ModelParallelStrategy"),
    ("ddp_custom", "Lightning DDPStrategy"),
)


def loader_of(samples: int, batch: int) -> DataLoader[Any]:
    """Random tokens; the strategies deal them out to ranks that read different samples."""
    return DataLoader(tokens(samples, LENGTH), batch_size=batch, shuffle=False)


def own_share(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The batches of this rank, where every rank reads its own."""
    return DataLoader(loader.dataset, batch_size=BATCH, sampler=DistributedSampler(loader.dataset, shuffle=False))


def hand_written(
    turns: Turns, build_model: Callable[[], nn.Module], batches: Iterable[list[Tensor]], device: torch.device
) -> None:
    """The loop that one would write without Lightning."""
    torch.manual_seed(0)  # weights are equal on all ranks
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (batch,) in batches:
        turns.pause()
        optimizer.zero_grad()
        loss = model(batch.to(device))
        loss.backward()
        optimizer.step()


def hand_written_pipeline(turns: Turns, batches: Iterable[list[Tensor]], device: torch.device) -> None:
    """The same with a stage of the model a rank, which the schedule runs forward and backward."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = StageByHand(SplitGPT(), rank, ranks).to(device)
    stage = PipelineStage(model, rank, ranks, device)
    schedule = Schedule1F1B(stage, MICROBATCHES * ranks, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for (batch,) in batches:
        turns.pause()
        optimizer.zero_grad()
        batch = batch.to(device)
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == ranks - 1 else None)
        optimizer.step()


def contenders(accelerator: str, device: torch.device, steps: int) -> dict[str, Callable[[Turns], None]]:
    """Name -> a function that trains, and pauses between steps."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))
    own = loader_of(steps * BATCH * ranks, BATCH)
    shared = loader_of(steps * MICROBATCHES * ranks, MICROBATCHES * ranks)  # all ranks read all of it

    def fsdp() -> nn.Module:
        model = GPT().to(device)
        shard(model, mesh)
        return model

    def ddp() -> nn.Module:
        return DistributedDataParallel(GPT().to(device), gradient_as_bucket_view=True)

    def tensor() -> nn.Module:
        model = SplitGPT().to(device)
        split_by_hand(model, mesh)
        return model

    def by_hand(model: Callable[[], nn.Module], batches: Iterable[list[Tensor]]) -> Callable[[Turns], None]:
        return lambda turns: hand_written(turns, model, batches, device)

    def train(
        strategy: Callable[[], Any], module: Callable[[], Module], loader: DataLoader[Any] = own
    ) -> Callable[[Turns], None]:
        return lambda turns: through_lightning(turns, strategy(), module(), loader, accelerator)

    def ours(text: str, model: Callable[[], GPT] = GPT, loader: DataLoader[Any] = own) -> Callable[[Turns], None]:
        return train(lambda: lightning_parallel.build_strategy(text), lambda: Module(model), loader)

    return {
        "fsdp_custom": ours("fsdp_custom"),
        "hand-written FSDP2": by_hand(fsdp, own_share(own)),
        "Lightning ModelParallelStrategy": train(lambda: ModelParallelStrategy(ranks, 1), ShardedByHand),
        "ddp_custom": ours("ddp_custom"),
        "hand-written DDP": by_hand(ddp, own_share(own)),
        "Lightning DDPStrategy": train(lambda: DDPStrategy(gradient_as_bucket_view=True), Module),
        "tp_custom": ours("tp_custom", SplitGPT, shared),
        "hand-written tensor parallel": by_hand(tensor, shared),
        "pp_custom": ours(f"pp_custom:microbatches={MICROBATCHES * ranks}", SplitGPT, shared),
        "hand-written pipeline": lambda turns: hand_written_pipeline(turns, shared, device),
    }


def measure(accelerator: str, rounds: int, only: list[str] | None) -> None:
    """Run on one rank; rank 0 prints."""
    device = set_up(accelerator)
    pairs = [pair for pair in PAIRS if not only or pair[0] in only]
    runs = contenders(accelerator, device, WARM_UP + rounds + 2)
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    turns = {name: Turns(runs[name]) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(1 + WARM_UP + rounds):  # the first turn is the set-up
        for name in names[index % len(names) :] + names[: index % len(names)]:
            dist.barrier()
            seconds[name].append(turns[name].step())
    if dist.get_rank() == 0:
        report({name: times[1 + WARM_UP :] for name, times in seconds.items()}, pairs, rounds)
    dist.barrier()
    os._exit(0)  # the contenders wait for a turn that does not come


def report(seconds: dict[str, list[float]], pairs: list[tuple[str, str]], rounds: int) -> None:
    """The table of ratios."""
    print(f"{dist.get_world_size()} ranks, {rounds} rounds")
    print(f"{'':14} {'over':34} {'median ratio':>12} {'quarter':>8} {'quarter':>8} {'over ms':>8}")
    for ours, theirs in pairs:
        ratios = [a / b for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        step = 1000 * statistics.median(seconds[theirs])
        print(f"{ours:14} {theirs:34} {middle:12.3f} {low:8.3f} {high:8.3f} {step:8.0f}", flush=True)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", nargs="*", help="names whose rows are wanted, such as tp_custom")
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv, options.ranks))
    measure(options.accelerator, options.rounds, options.only)


if __name__ == "__main__":
    main()
