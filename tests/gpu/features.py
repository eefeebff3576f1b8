"""Sections about what surrounds a step: each yields a `Check` for each thing that it looks at."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.callbacks import (
    DevicePrefetch,
    Doctor,
    ExponentialMovingAverage,
    GpuMonitor,
    GradientNorm,
    StepBreakdown,
    Throughput,
    Verify,
)
from tests.gpu.machine import NO_GPU, Check, Machine, readers_of, tried
from tests.gpu.models import BILLION, Module, Size
from tests.gpu.numbers import STEPS, TOLERANCES, Plain, apart, trained

# Evaluation ----------------------------------------------------------------------------------------------------------


class _Evaluated(Module):
    """Validates, too, and notes the mode in which it is."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Note the loss, as Lightning logs it."""
        self.was_inference = torch.is_inference_mode_enabled()
        self.log("val", self.model(batch[0]), sync_dist=True)


def evaluate(machine: Machine) -> Iterator[Check]:
    """Validation before training, and again within it, leaves weights and logged values as they are on one device."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    expected: dict[int, Any] = {}

    def both(name: str) -> Iterator[Check]:
        readers = readers_of(name, machine.num_ranks)
        expected[readers] = expected.get(readers) or _validated(machine, None, readers)
        value, weights = _validated(machine, build_strategy(name), readers)
        yield Check(f"evaluate/{name}: weights", machine.largest(apart(weights, expected[readers][1])), 1e-5)
        yield Check(f"evaluate/{name}: loss", machine.largest(abs(value - expected[readers][0])), 1e-5)

    for name in machine.names:
        yield from tried(f"evaluate/{name}", lambda name=name: both(name))


def _validated(machine: Machine, strategy: Any, readers: int) -> tuple[float, dict[str, Tensor]]:
    size = Size()
    L.seed_everything(1, verbose=False)
    module = _Evaluated(size, optimizer="sgd")
    trainer = machine.trainer(strategy)
    loader = machine.loader(size, STEPS, readers, of_all=strategy is None)
    trainer.validate(module, loader, verbose=False)
    trainer.fit(module, loader, loader)
    weights = module.state_dict() if strategy is None else full_state_dict(trainer)
    return float(trainer.callback_metrics["val"]), {name: value.cpu() for name, value in weights.items()}


# Memory --------------------------------------------------------------------------------------------------------------

POLICIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fsdp_custom", {"precision": "32-true"}),
    ("fsdp_custom", {"precision": "bf16-mixed"}),
    ("fsdp_custom", {"precision": "bf16-true"}),
    ("fsdp_custom:recompute=full", {"precision": "bf16-mixed"}),
    ("fsdp_custom:recompute=selective", {"precision": "bf16-mixed"}),
    ("fsdp_custom:compile=layers", {"precision": "bf16-mixed"}),
    ("fsdp_custom:optimizer_in_backward=true", {"precision": "bf16-mixed"}),
    ("fsdp_custom:offload=optimizer", {"precision": "bf16-mixed"}),
    ("fsdp_offload_custom", {"precision": "bf16-mixed"}),
    ("ddp_custom", {"precision": "bf16-mixed"}),
)
BYTES_OF_STATE = {"bf16-true": 8}
"""Of parameters, gradients and moments of AdamW, a parameter: 16 in fp32, as the page on sizing says."""


class _Steps(Callback):
    """The time of each step."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self._last = machine, 0.0
        self.seconds: list[float] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._machine.has_gpu:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        self._last = now


class _Peak(_Steps):
    """Also the most that is allocated in the steps from `first` to before `last`."""

    def __init__(self, machine: Machine, first: int, last: int) -> None:
        super().__init__(machine)
        self._first, self._end = first, last
        self.bytes = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if not self._machine.has_gpu:
            return
        if batch_idx == self._first:
            torch.cuda.reset_peak_memory_stats()
        if batch_idx == self._end:
            self.bytes = torch.cuda.max_memory_allocated()


def _fit(machine: Machine, strategy: str, noted: _Steps, size: Size, steps: int, **arguments: Any) -> int:
    """Train; the bytes that were there before, which is what earlier trainings have left."""
    gc.collect()
    if machine.has_gpu:
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() if machine.has_gpu else 0
    module = machine.built(size)
    options = {"precision": "bf16-mixed", **arguments}
    machine.fit(build_strategy(strategy), module, size, steps, machine.num_ranks, callbacks=[noted], **options)
    return before


def memory(machine: Machine) -> Iterator[Check]:
    """Peak and time of a step under policies, beside the arithmetic of state."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // machine.num_ranks))  # for state in host memory
    size = BILLION if machine.has_gpu else Size()
    with torch.device("meta"):
        number = sum(p.numel() for p in Module(size).parameters())

    def of(strategy: str, arguments: dict[str, Any]) -> Iterator[Check]:
        what = " ".join([f"memory/{strategy}", *(f"{key}={value}" for key, value in arguments.items())])
        noted = _Peak(machine, 2, 7)
        before = _fit(machine, f"{strategy}{',' if ':' in strategy else ':'}check=off", noted, size, 8, **arguments)
        state = number * BYTES_OF_STATE.get(arguments["precision"], 16) / machine.num_ranks
        yield Check(f"{what}: GiB at most", (noted.bytes - before) / 2**30 if machine.has_gpu else None)
        yield Check(f"{what}: GiB of state by arithmetic", state / 2**30)
        yield Check(f"{what}: seconds of a step", statistics.median(noted.seconds[2:]))

    for strategy, arguments in POLICIES:
        yield from tried(f"memory/{strategy}", lambda strategy=strategy, arguments=arguments: of(strategy, arguments))


# Float8 --------------------------------------------------------------------------------------------------------------


def float8(machine: Machine) -> Iterator[Check]:
    """Losses and time of float8 over those of bf16, layers compiled."""
    if not machine.has_gpu:
        yield Check("float8", why=NO_GPU)
        return
    small, size = replace(Size(), width=256, length=128), replace(BILLION, depth=8)

    def of(recipe: str) -> Iterator[Check]:
        expected, _ = trained(machine, None, small, machine.num_ranks, precision="bf16-mixed")
        strategy = build_strategy(f"fsdp_custom:float8={recipe}")
        losses, _ = trained(machine, strategy, small, machine.num_ranks, precision="bf16-mixed")
        value = float((torch.tensor(losses) - torch.tensor(expected)).abs().max())
        yield Check(f"float8/{recipe}: largest difference in losses", machine.largest(value), 5e-2)
        seconds = [_seconds(machine, size, options) for options in ("", f",float8={recipe}")]
        yield Check(f"float8/{recipe}: time of a step over that in bf16, compiled", seconds[1] / seconds[0])

    for recipe in ("tensorwise", "rowwise"):
        yield from tried(f"float8/{recipe}", lambda recipe=recipe: of(recipe))


def _seconds(machine: Machine, size: Size, options: str) -> float:
    noted = _Steps(machine)
    _fit(machine, f"fsdp_custom:check=off,compile=layers{options}", noted, size, 12)
    return statistics.median(noted.seconds[4:])


# Callbacks -----------------------------------------------------------------------------------------------------------


def callbacks(machine: Machine) -> Iterator[Check]:
    """Fits with each of the callbacks that look at a device, and what these log."""
    made: dict[str, Callable[[], Callback]] = {
        "Throughput": functools.partial(Throughput),
        "GpuMonitor": functools.partial(GpuMonitor),
        "StepBreakdown": functools.partial(StepBreakdown),
        "Doctor": functools.partial(Doctor),
        "Verify": functools.partial(Verify, every=2),
        "DevicePrefetch": functools.partial(DevicePrefetch),
        "GradientNorm": functools.partial(GradientNorm),
        "ExponentialMovingAverage": functools.partial(ExponentialMovingAverage, decay=0.9),
    }
    size = replace(Size(), width=512, length=256, batch=8) if machine.has_gpu else Size()
    expected, _ = trained(machine, None, size, machine.num_ranks)

    def of(name: str) -> Iterator[Check]:
        logged, losses = _Logged(), _Losses()
        L.seed_everything(1, verbose=False)
        options = {"callbacks": [made[name](), losses], "logger": logged, "log_every_n_steps": 1, "max_epochs": 2}
        machine.fit(build_strategy("fsdp_custom"), Plain(size), size, STEPS, machine.num_ranks, **options)
        difference = (torch.tensor(losses.losses[:STEPS]) - torch.tensor(expected)).abs().max()
        value = float(difference) if machine.num_ranks == 1 else None
        what = ", ".join(f"{key}={number:.4g}" for key, number in logged.values.items())
        yield Check(f"callbacks/{name}: largest difference in losses", value, TOLERANCES["32-true"], why=what)

    for name in made:
        yield from tried(f"callbacks/{name}", lambda name=name: of(name))


class _Losses(Callback):
    """Those of each step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


class _Logged(Logger):
    """Keeps what was logged last."""

    name, version = "logged", 0

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, float] = {}

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep them."""
        self.values.update(metrics)


# The first step ------------------------------------------------------------------------------------------------------


def first(machine: Machine) -> Iterator[Check]:
    """Time in steps, and memory, that the check of the first step adds; on one rank there is nothing to compare."""
    if machine.num_ranks == 1:
        yield Check("first", why="needs two ranks")
        return
    size = replace(BILLION, width=1024, depth=8, length=1024, vocabulary=8_000) if machine.has_gpu else Size()

    def of(name: str) -> Iterator[Check]:
        _to_update(machine, name, "off", size)  # kernels are loaded
        (bare, least, step), (checked, most, _) = (_to_update(machine, name, each, size) for each in ("off", "auto"))
        yield Check(f"first/{name}: added, in steps", (checked - bare) / step, 1.0 if machine.has_gpu else None)
        if machine.has_gpu:
            # Under sharding, a whole copy and its gradients take more than a rank's part of them and of the moments.
            limit = 1.05 if name == "ddp_custom" else None
            yield Check(f"first/{name}: peak of three steps over that without", most / least, limit)

    for name in ("ddp_custom", "fsdp_custom"):
        yield from tried(f"first/{name}", lambda name=name: of(name))


def _to_update(machine: Machine, name: str, check: str, size: Size) -> tuple[float, float, float]:
    """Seconds of the first step, the bytes that it takes at most, and seconds of a later one."""
    noted = _Peak(machine, 0, 3)
    before = _fit(machine, f"{name}:check={check}", noted, size, 10)
    return noted.seconds[0], noted.bytes - before, statistics.median(noted.seconds[4:])
