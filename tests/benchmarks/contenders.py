"""Train the same model in several ways that take turns, on ranks that this file starts.

All contenders live in one process a rank and take turns in an order that turns with each round, so that what else the
machine does falls on all of them. On shared cores only ratios of one round mean anything.
"""

from __future__ import annotations

import functools
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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH, HEADS, DEPTH = 256, 384, 6, 6
SPLIT_HEADS, SPLIT_DEPTH = 8, 8
"""Of the model whose heads and layers ranks share: up to eight of them."""


class GPT(nn.Module):
    """10.8 M parameters in six layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = self.build_blocks()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def build_blocks(self) -> nn.ModuleList:
        """The stack of layers."""
        layer = functools.partial(nn.TransformerEncoderLayer, dropout=0.0, batch_first=True)
        return nn.ModuleList(layer(WIDTH, HEADS, 4 * WIDTH) for _ in range(DEPTH))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[batch, length]` to the mean loss of predicting each token itself (a scalar)."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x), tokens)


class Layer(nn.Module):
    """A layer with a linear map for each of queries, keys and values, which can be split by hand, too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states `[batch, length, width]` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Attends with as many heads as its linear maps give."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states `[batch, length, width]` to the same shape."""
        query, key, value = (
            linear(x).unflatten(-1, (-1, WIDTH // SPLIT_HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        heads = F.scaled_dot_product_attention(query, key, value)
        return self.output(heads.transpose(1, 2).flatten(2))


class SplitGPT(GPT):
    """14.4 M parameters in eight layers, which ranks can share."""

    def build_blocks(self) -> nn.ModuleList:
        """The stack of layers."""
        return nn.ModuleList(Layer() for _ in range(SPLIT_DEPTH))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """The mean loss (a scalar) of logits `[batch, length, vocabulary]` for tokens `[batch, length]`."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Module(L.LightningModule):
    """The module as a user writes it.

    Args:
        build_model: Makes its model.
    """

    def __init__(self, build_model: Callable[[], GPT] = GPT) -> None:
        super().__init__()
        self.model = build_model()

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

    def step(self, times: int = 1) -> float:
        """Let the contender run until it has paused so many times; the seconds it took."""
        start = time.perf_counter()
        for _ in range(times):
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


def split_by_hand(model: GPT, mesh: DeviceMesh) -> None:
    """Tensor parallel over `mesh`, in place: branches share one input, so that gradients of it are reduced once."""
    whole = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    columns = {name: ColwiseParallel() for name in ("attention.query", "attention.key", "attention.value", "mlp.0")}
    rows = {name: RowwiseParallel() for name in ("attention.output", "mlp.2")}
    for block in model.blocks:
        parallelize_module(block, mesh, {"attention": whole, **columns, **rows})


class StageByHand(nn.Module):
    """A part of a model: equally many layers a stage, the embedding in the first, the head in the last.

    Args:
        model: The whole model.
        index: Which stage.
        num_stages: How many there are.
    """

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        size = len(model.blocks) // num_stages
        self.tokens = model.tokens if index == 0 else nn.Identity()
        self.blocks = model.blocks[index * size : (index + 1) * size]
        self.head = model.head if index == num_stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states to hidden states or logits."""
        x = self.tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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
