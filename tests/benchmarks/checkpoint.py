# python tests/benchmarks/checkpoint.py
# python tests/benchmarks/checkpoint.py --accelerator cuda --ranks 8 --width 4096 --depth 32
"""Time, bytes and memory of a checkpoint in each form, beside torch.distributed.checkpoint, torch and Lightning.

A GPT is trained by AdamW for two steps, sharded by FSDP2, and saved and read in turn by each of the ways, in the same
ranks, several times over. The table shows medians: how long training waits for a save, how long it takes until the
checkpoint is on the disk, and how long reading it takes; its bytes; and the most that any rank's resident set grew
meanwhile, beside the bytes of a rank's shards and of the largest tensor. The last lines are what the forms are held to.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import contenders
import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contenders import GPT, Module, ShardedByHand, set_up, start_ranks, synchronize, tokens
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.utils.data import DataLoader

import lightning_parallel
from lightning_parallel.ranks.memory import peak_memory, reset_peak_memory

GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
FORMS = ("whole", "sharded", "async-whole", "async-sharded")
HAND, TORCH, LIGHTNING = "DCP by hand", "torch.save", "Lightning ModelParallelStrategy"
HOST = torch.device("cpu")
MB = 2**20


class Measured(Callback):
    """Saves and reads behind the second step, and notes what that takes."""

    def __init__(self, way: str, path: Path) -> None:
        self.way, self.path = way, path
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        """Behind the second step, and behind no other."""
        if trainer.global_step != 2:
            return
        save, settle, read = self._steps(trainer, module)
        gc.collect()
        reset_peak_memory(HOST)
        before = peak_memory(HOST)
        self.found["blocked"] = timed(save, is_common=False)
        self.found["saved"] = self.found["blocked"] + timed(settle)
        self.found["peak of saving"] = peak_memory(HOST) - before
        gc.collect()
        reset_peak_memory(HOST)
        before = peak_memory(HOST)
        self.found["read"] = timed(read)
        self.found["peak of reading"] = peak_memory(HOST) - before
        self.found["bytes"] = sum(each.stat().st_size for each in (self.path, *self.path.glob("*")) if each.is_file())
        self.found["shards"], self.found["largest"] = sizes(module, trainer)

    def _steps(self, trainer: L.Trainer, module: L.LightningModule) -> tuple[Callable[[], Any], ...]:
        if self.way == HAND:
            return by_hand(trainer, module, self.path)
        if self.way == TORCH:
            return by_torch(trainer, module, self.path)
        strategy: Any = trainer.strategy
        return (
            lambda: trainer.save_checkpoint(self.path),
            getattr(strategy, "settle", lambda: None),
            lambda: restore(strategy, self.path),
        )


def restore(strategy: Any, path: Path) -> None:
    """Read a checkpoint as a fit that resumes does."""
    for optimizer in strategy.optimizers:
        optimizer.state.clear()  # which is not there yet
    checkpoint = strategy.load_checkpoint(path)
    strategy.load_model_state_dict(checkpoint)
    if "optimizer_states" in checkpoint:  # Lightning's sharded ones are read with the model
        strategy.load_optimizer_state_dict(checkpoint)


def by_hand(trainer: L.Trainer, module: L.LightningModule, path: Path) -> tuple[Callable[[], Any], ...]:
    """As torch's tutorial has it, with what keeps a half-written folder from being taken for a whole one left out."""

    def state() -> dict[str, Any]:
        model, optimizers = get_state_dict(module, trainer.optimizers)
        return {"model": model, "optimizers": optimizers}

    def read() -> None:
        found = state()
        dcp.load(found, checkpoint_id=path)
        set_state_dict(
            module, trainer.optimizers, model_state_dict=found["model"], optim_state_dict=found["optimizers"]
        )

    return lambda: dcp.save(state(), checkpoint_id=path), lambda: None, read


def by_torch(trainer: L.Trainer, module: L.LightningModule, path: Path) -> tuple[Callable[[], Any], ...]:
    """One file of rank 0, by torch's own functions."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)

    def save() -> None:
        state = get_state_dict(module, trainer.optimizers, options=whole)
        if dist.get_rank() == 0:
            torch.save(state, path)

    def read() -> None:
        model, optimizers = torch.load(path, mmap=True, weights_only=True)
        options = StateDictOptions(full_state_dict=True)
        set_state_dict(module, trainer.optimizers, model_state_dict=model, optim_state_dict=optimizers, options=options)

    return save, lambda: None, read


def timed(action: Callable[[], Any], *, is_common: bool = True) -> float:
    """The seconds that `action` takes; until all ranks are done, if that is common to them."""
    dist.barrier()
    start = time.perf_counter()
    action()
    if is_common:
        synchronize()
        dist.barrier()
    return time.perf_counter() - start


def sizes(module: L.LightningModule, trainer: L.Trainer) -> tuple[int, int]:
    """The bytes of this rank's parameters and optimizer state, and of the largest whole tensor."""
    tensors = [*module.parameters()]
    tensors += [each for state in trainer.optimizers[0].state.values() for each in state.values()]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.nbytes for each in local), max(each.numel() * each.element_size() for each in tensors)


def run(way: str, path: Path, accelerator: str, samples: int) -> dict[str, float]:
    """Train, and measure one way once."""
    ranks = dist.get_world_size()
    is_lightnings = way == LIGHTNING
    form = way if way in FORMS else "whole"
    ours = f"fsdp_custom:check=off,checkpoint={form}"
    strategy = ModelParallelStrategy(ranks, 1) if is_lightnings else lightning_parallel.build_strategy(ours)
    callback = Measured(way, path)
    trainer = L.Trainer(
        accelerator=accelerator, devices=ranks, strategy=strategy, max_steps=2, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit((ShardedByHand if is_lightnings else Module)(GPT), DataLoader(tokens(samples, 32), batch_size=1))
    return callback.found


def measure(options: argparse.Namespace) -> None:
    """Run on one rank; rank 0 prints."""
    set_up(options.accelerator)
    contenders.WIDTH, contenders.DEPTH, contenders.HEADS = options.width, options.depth, options.width // 64
    folder = Path(options.folder)
    ways = [*FORMS, HAND, TORCH, *([] if options.without_lightning else [LIGHTNING])]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for index in range(1 + options.rounds):  # the first one warms up
        for way in ways[:: 1 if index % 2 else -1]:
            path = folder / "checkpoint"
            own = run(way, path, options.accelerator, 2 * dist.get_world_size())
            of_all: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(of_all, own)
            if index:
                found[way].append({key: max(each[key] for each in of_all) for key in own})
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            dist.barrier()
    if dist.get_rank() == 0:
        report(
            {
                way: {key: statistics.median(each[key] for each in rows) for key in rows[0]}
                for way, rows in found.items()
            }
        )
    dist.destroy_process_group()


def medians_of(rows: list[dict[str, float]]) -> dict[str, float]:
    """The median of each measure over the rounds."""
    return {key: statistics.median(each[key] for each in rows) for key in rows[0]}


def report(medians: dict[str, dict[str, float]]) -> None:
    """The table, and what the forms are held to."""
    any_way = next(iter(medians.values()))
    print(f"a rank's shards {any_way['shards'] / MB:.0f} MiB, the largest tensor {any_way['largest'] / MB:.0f} MiB")
    names = ("blocked", "saved", "read")
    print(f"{'':34}", *(f"{name + ' s':>10}" for name in names), f"{'MiB':>8} {'save +MiB':>10} {'read +MiB':>10}")
    for way, each in medians.items():
        peaks = each["peak of saving"] / MB, each["peak of reading"] / MB
        times = (f"{each[name]:10.2f}" for name in names)
        print(f"{way:34}", *times, f"{each['bytes'] / MB:8.0f} {peaks[0]:10.0f} {peaks[1]:10.0f}")
    hand, sharded = medians[HAND], medians["sharded"]
    for name in ("saved", "read"):
        print(f"sharded over DCP by hand, {name}: {sharded[name] / hand[name]:.2f} (1.10)")
    for form in ("whole", "sharded"):
        blocked = medians[f"async-{form}"]["blocked"] / medians[form]["saved"]
        print(f"async-{form} blocks for {blocked:.2f} of {form} (0.20)")
    room = any_way["largest"] + 0.05 * any_way["shards"]
    for name in ("saving", "reading"):
        print(f"sharded, growth of {name} over one tensor and 5 %: {sharded[f'peak of {name}'] / room:.2f} (1.00)")


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accelerator", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--folder", help="where to write; by default a new temporary folder")
    parser.add_argument("--without-lightning", action="store_true", help="leave out Lightning's own strategy")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        given = [] if options.folder else ["--folder", folder]
        sys.exit(start_ranks([*sys.argv, *given], options.ranks, GIVE_BACK))


if __name__ == "__main__":
    main()
