"""Sections about memory, synchronisation and time: each yields a `Check` for each thing that it looks at."""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_parallel import DDPStrategy, MeshStrategy, build_strategy
from tests.benchmarks.contenders import Turns, through_lightning
from tests.gpu.machine import NO_GPU, Check, Machine, readers_of, tried
from tests.gpu.models import BILLION, GPT, Module, Size, tokens

PEAK_FLOPS = 989e12
"""Of dense bf16 products of an H100 or H200, from its data sheet."""
STEPS, FIRST = 7, 4
"""What waits is counted from `FIRST` on: the package compares ranks and looks for what is rare in the steps before."""


# Memory ------------------------------------------------------------------------------------------------------------


class _AtStart(Callback):
    """Does something when everything that training needs is there."""

    def __init__(self, action: Callable[[L.Trainer], object]) -> None:
        self._action = action

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._action(trainer)


def setup(machine: Machine) -> Iterator[Check]:
    """Memory while a module is sharded, and while a checkpoint of ZeRO-1 is saved, in units of the parameters."""
    size = replace(BILLION, batch=1, length=128) if machine.has_gpu else Size()
    num_bytes = 4 * sum(p.numel() for p in _on_meta(size).parameters())
    unit = 4 * sum(p.numel() for p in _on_meta(size).blocks[0].parameters()) / num_bytes
    embedding = 4 * size.vocabulary * size.width / num_bytes
    for name, is_deferred in (("deferred", True), ("eager", False)):
        peaks: list[int] = []
        note = _AtStart(lambda _, peaks=peaks: peaks.append(_peak(machine)))

        def fit(is_deferred: bool = is_deferred, note: Callback = note) -> None:
            machine.fit(
                MeshStrategy(), Module(size, is_deferred=is_deferred), size, 1, machine.num_ranks, callbacks=[note]
            )

        if machine.has_gpu:
            machine.peak_of(fit)
            share = machine.largest(peaks[0] / num_bytes)
            # Of the rest, which is a unit of its own, the embedding and the head are the largest.
            yield Check(f"setup/{name}", share, 1.05 / machine.num_ranks + unit + 2 * embedding)
        else:
            fit()
            yield Check(f"setup/{name}", why=NO_GPU)
    with tempfile.TemporaryDirectory() as folder:
        grown: list[int] = []

        def save(trainer: L.Trainer) -> None:
            saving = functools.partial(trainer.save_checkpoint, Path(folder) / "zero.ckpt")
            grown.append(machine.peak_of(saving) if machine.has_gpu else 0)

        saver = _AtEnd(save)
        machine.fit(build_strategy("zero1_custom"), machine.built(size), size, 2, machine.num_ranks, callbacks=[saver])
        value = machine.largest(grown[0] / num_bytes) if machine.has_gpu else None
        yield Check("setup/zero1 checkpoint", value, 0.02, why="" if machine.has_gpu else NO_GPU)


class _AtEnd(_AtStart):
    """Does something after the last step."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Not yet."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._action(trainer)


def _on_meta(size: Size) -> GPT:
    with torch.device("meta"):
        return GPT(size)


def _peak(machine: Machine) -> int:
    return torch.cuda.max_memory_allocated(machine.device) if machine.has_gpu else 0


# Synchronisation -----------------------------------------------------------------------------------------------------


class _Reads(TorchDispatchMode):
    """Counts values that are read from tensors, for which a device would have to be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class _Synchronisations(Callback):
    """Counts what waits for the device from the start of step `FIRST` to the end of the last one."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._open = ExitStack()
        self._warnings: list[Any] = []
        self._reads = _Reads()
        self.places: list[str] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != FIRST:
            return
        if self._machine.has_gpu:
            torch.cuda.set_sync_debug_mode("warn")
            self._warnings = self._open.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
        else:
            self._open.enter_context(self._reads)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != STEPS - 1:
            return
        if self._machine.has_gpu:
            torch.cuda.set_sync_debug_mode("default")
        self._open.close()
        found = [each for each in self._warnings if "synchronizing" in str(each.message)]
        self.places = [f"{each.filename}:{each.lineno}" for each in found]

    @property
    def count(self) -> int:
        return len(self.places) if self._machine.has_gpu else self._reads.count


def syncs(machine: Machine) -> Iterator[Check]:
    """What waits for the device in three steps, beyond plain Lightning's."""
    size = Size()
    plain = _Synchronisations(machine)
    machine.fit(None, Module(size), size, STEPS, callbacks=[plain])

    def of(name: str) -> Iterator[Check]:
        counted, readers = _Synchronisations(machine), readers_of(name, machine.num_ranks)
        machine.fit(build_strategy(name), Module(size), size, STEPS, readers, callbacks=[counted])
        places = ", ".join(f"{count} x {place}" for place, count in Counter(counted.places).items())
        limit = 0.0 if machine.has_gpu and not machine.is_shared else None  # gloo copies to the host
        yield Check(f"syncs/{name}", machine.largest(counted.count - plain.count), limit, why=places)

    for name in machine.names:
        yield from tried(f"syncs/{name}", lambda name=name: of(name))


# Time ----------------------------------------------------------------------------------------------------------------


def _by_hand(machine: Machine, wrapping: str, size: Size, steps: int, *, compiles: bool) -> Callable[[Turns], None]:
    """The loop that one would write without Lightning, in bf16."""

    def run(turns: Turns) -> None:
        torch.manual_seed(0)
        with machine.device:
            model: Any = GPT(size)
        if compiles:
            for block in model.blocks:
                block.compile()
        if wrapping == "fsdp":
            mesh = init_device_mesh(machine.device.type, (machine.num_ranks,))
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh, mp_policy=policy)
        elif dist.is_initialized():
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for (batch,) in DataLoader(tokens(size, steps * size.batch), size.batch):
            turns.pause()
            with torch.autocast(machine.device.type, torch.bfloat16):
                loss = model(batch.to(machine.device, non_blocking=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return run


def step(machine: Machine, wrapping: str, *, compiles: bool) -> Iterator[Check]:
    """Time and memory of a step over a loop by hand: time in turns, memory one after the other."""
    what = f"step_{wrapping}{'_compiled' if compiles else ''}"
    size = BILLION if machine.has_gpu else Size()
    # Of several steps a turn: a device that is waited for behind each would be idle while the next one begins.
    rounds, warm_up, block = (12, 2, 4) if machine.has_gpu else (6, 2, 1)
    both = _contenders(machine, wrapping, size, (1 + warm_up + rounds) * block, compiles=compiles)
    turns = {name: Turns(contender) for name, contender in both.items()}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for number in range(1 + warm_up + rounds):
        for name in list(both) if number % 2 else list(both)[::-1]:
            seconds[name].append(turns[name].step(block) / block)
    for each in turns.values():
        each.step()  # the last, behind which a contender ends and frees what it holds
    turns.clear()
    ours, theirs = (seconds[name][1 + warm_up :] for name in both)
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    yield Check(f"{what}: time over a loop by hand", machine.largest(ratio), 1.02 if machine.has_gpu else None)
    if machine.has_gpu:
        mfu = size.flops / statistics.median(ours) / PEAK_FLOPS
        # Norms, and the like, are not fused where nothing is compiled: a loop by hand does not reach a half either.
        yield Check(f"{what}: share of the peak FLOPs", mfu, 0.5 if compiles else None, is_least=True)
        yield Check(f"{what}: share of the peak FLOPs by hand", size.flops / statistics.median(theirs) / PEAK_FLOPS)
        peaks = {}
        for name, contender in _contenders(machine, wrapping, size, 3, compiles=compiles).items():
            peaks[name] = machine.peak_of(functools.partial(contender, _Clock([])))
        share = machine.largest(peaks["ours"] / peaks["by hand"])
        yield Check(f"{what}: peak over that of a loop by hand", share, 1.01)


def _contenders(
    machine: Machine, wrapping: str, size: Size, steps: int, *, compiles: bool
) -> dict[str, Callable[[Any], None]]:
    options = {"check": "off", **({"compile": "layers"} if compiles else {})}

    def ours(turns: Any) -> None:
        strategy: Any = (DDPStrategy if wrapping == "ddp" else MeshStrategy)(**options)
        loader = DataLoader(tokens(size, steps * size.batch * machine.num_ranks), size.batch)
        module = machine.built(size, optimizer="fused")
        through_lightning(turns, strategy, module, loader, machine.accelerator, precision="bf16-mixed")

    return {"ours": ours, "by hand": _by_hand(machine, wrapping, size, steps, compiles=compiles)}


def host(machine: Machine) -> Iterator[Check]:
    """CPU time of the main thread a layer and step, over a loop by hand, on tensors so small that only it counts."""
    for wrapping in ("ddp", "fsdp"):
        times: dict[tuple[str, int], float] = {}
        for depth in (4, 12):
            size, steps = Size(width=16, depth=depth, heads=2, length=4, batch=1), 24
            noted: list[float] = []
            strategy: Any = DDPStrategy(check="off") if wrapping == "ddp" else MeshStrategy(check="off")
            machine.fit(
                strategy, Module(size, optimizer="fused"), size, steps, machine.num_ranks,
                callbacks=[_ThreadTime(noted)], precision="bf16-mixed",
            )  # fmt: skip
            times["ours", depth] = statistics.median(noted[8:])
            noted = []
            # Its own pauses begin the steps, in this thread.
            _by_hand(machine, wrapping, size, steps, compiles=False)(_Clock(noted))  # type: ignore[arg-type]
            times["by hand", depth] = statistics.median(noted[8:])
        ours, theirs = (times[who, 12] - times[who, 4] for who in ("ours", "by hand"))
        limit = 1.08 if machine.has_gpu else None
        yield Check(f"host/{wrapping}: time of a layer over a loop by hand", machine.largest(ours / theirs), limit)


class _ThreadTime(Callback):
    """Notes the time that this thread has worked from one step to the next."""

    def __init__(self, noted: list[float]) -> None:
        self._noted, self._last = noted, 0.0

    def on_train_batch_start(self, *args: Any) -> None:
        now = time.thread_time()
        if self._last:
            self._noted.append(now - self._last)
        self._last = now


class _Clock(_ThreadTime):
    """The same for a loop by hand."""

    def pause(self) -> None:
        self.on_train_batch_start()
