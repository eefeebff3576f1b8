"""Train the same model in several ways that take turns, on ranks that this file starts.

All contenders live in one process a rank and take turns in an order that turns with each round, so that what else the
machine does falls on all of them. On shared cores only ratios of one round mean anything.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, DEPTH = 256, 384, 6


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
        self._before_next: list[Callable[[], object]] = []
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
        while self._before_next:
            self._before_next.pop()()

    def before_next(self, action: Callable[[], object]) -> None:
        """Let the contender's own thread do `action` when its next turn begins."""
        self._before_next.append(action)

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


def tokens(count: int, length: int) -> TensorDataset:
    """`count` samples of random tokens `[length]`, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, VOCABULARY, (count, length), generator=generator))


def through_lightning(
    turns: Turns, strategy: Any, module: Module, loader: DataLoader[Any], accelerator: str, **trainer: Any
) -> None:
    """Train in a Trainer, pausing before each batch."""
    L.Trainer(
        accelerator=accelerator,
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=1,
        callbacks=[Pause(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **trainer,
    ).fit(module, loader)


def set_up(accelerator: str) -> torch.device:
    """Join the other ranks; this rank's device."""
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    device = torch.device("cpu") if accelerator == "cpu" else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if accelerator == "cpu" else "nccl")
    torch.set_num_threads(1)
    return device


def start_ranks(arguments: list[str], num_ranks: int, environment: Mapping[str, str] | None = None) -> int:
    """Run the script `arguments` once a rank; the exit status of the first that fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        **os.environ,
        **(environment or {}),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(num_ranks),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num_ranks)
    ]
    return next((code for code in [process.wait() for process in processes] if code), 0)
