# python recipes/benchmarks/step_overhead.py
# python recipes/benchmarks/step_overhead.py --rounds 40
# python recipes/benchmarks/step_overhead.py --accelerator cuda --ranks 8
"""What a step costs over a hand-written torch loop with the same wrapping, and over Lightning's own strategies.

All contenders live in one process a rank and take turns step by step, in an order that turns with each round; the table
shows the median, over the rounds, of the ratio of two contenders' steps in one round. On shared cores only such ratios
mean anything.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lightning_parallel

VOCABULARY, LENGTH, WIDTH, DEPTH, BATCH = 256, 64, 384, 6, 4
WARM_UP = 3
PAIRS = (
    ("fsdp_custom", "hand-written FSDP2"),
    ("ddp_custom", "hand-written DDP"),
    ("fsdp_custom", "Lightning ModelParallelStrategy"),
    ("ddp_custom", "Lightning DDPStrategy"),
)


class GPT(nn.Module):
    """10.9 M parameters, in layers of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 6, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(DEPTH)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[batch, length]` to the mean loss of predicting each token itself (a scalar)."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Module(L.LightningModule):
    """The module as a user writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A batch of tokens `[batch, length]` to the loss."""
        return self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW on all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ShardedByHand(Module):
    """The same module, as Lightning's own FSDP2 strategy needs it."""

    def configure_model(self) -> None:
        """Shard each layer, then the rest."""
        assert self.device_mesh is not None
        shard(self.model, self.device_mesh["data_parallel"])


class Turns:
    """Lets one of several threads run at a time, a step each."""

    def __init__(self, run: Callable[[Turns], None]) -> None:
        self._may_run, self._has_run = threading.Semaphore(0), threading.Semaphore(0)
        self._run = run
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self._may_run.acquire()
        self._run(self)
        self._has_run.release()

    def pause(self) -> None:
        """Called by the contender where a step ends and the next begins."""
        self._has_run.release()
        self._may_run.acquire()

    def step(self) -> float:
        """Let the contender run until it pauses; the seconds it took."""
        start = time.perf_counter()
        self._may_run.release()
        self._has_run.acquire()
        synchronize()
        return time.perf_counter() - start


class Pause(Callback):
    """The end of one step is the start of the next, data and hooks included."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def on_train_batch_start(self, *args: Any) -> None:
        """Another contender's turn."""
        self._turns.pause()


def shard(model: nn.Module, mesh: Any) -> None:
    """One unit for each layer, and one for the rest."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def synchronize() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def data(steps: int) -> TensorDataset:
    """Samples for `steps` batches on every rank."""
    count = steps * BATCH * dist.get_world_size()
    return TensorDataset(torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0)))


def hand_written(turns: Turns, wrap: Callable[[nn.Module], nn.Module], device: torch.device, steps: int) -> None:
    """The loop that one would write without Lightning."""
    torch.manual_seed(0)
    model = wrap(GPT().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    dataset = data(steps)
    for (tokens,) in DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False)):
        turns.pause()
        optimizer.zero_grad()
        loss = model(tokens.to(device))
        loss.backward()
        optimizer.step()


def through_lightning(turns: Turns, strategy: Any, module: Module, accelerator: str, steps: int) -> None:
    """The same steps in a Trainer."""
    trainer = L.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        callbacks=[Pause(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(data(steps), batch_size=BATCH, shuffle=False))


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
        return lambda turns: through_lightning(turns, strategy(), module(), accelerator, steps)

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
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if accelerator == "cpu" else torch.device("cuda", rank)
    dist.init_process_group("gloo" if accelerator == "cpu" else "nccl")
    torch.set_num_threads(1)
    turns = {name: Turns(run) for name, run in contenders(accelerator, device, WARM_UP + rounds + 2).items()}
    names = list(turns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for index in range(1 + WARM_UP + rounds):  # the first turn is the set-up
        for name in names[index % len(names) :] + names[: index % len(names)]:
            seconds[name].append(turns[name].step())
    if rank == 0:
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


def start_ranks(arguments: list[str], num_ranks: int) -> int:
    """Run this file once a rank; the exit status of the first that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=24)
    options = parser.parse_args()
    if "LOCAL_RANK" not in os.environ:
        sys.exit(start_ranks(sys.argv[1:], options.ranks))
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    measure(options.accelerator, options.rounds)


if __name__ == "__main__":
    main()
