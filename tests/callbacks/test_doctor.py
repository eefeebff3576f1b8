"""Each made-up bottleneck gets its verdict, and a healthy run gets none."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks import Doctor, StepBreakdown, Throughput, doctor
from lightning_parallel.callbacks.breakdown_windows import Straggler
from lightning_parallel.callbacks.exposed_time import exposed_seconds, merged, without
from lightning_parallel.callbacks.verdicts import Evidence, Throttling, verdict
from lightning_parallel.callbacks.worker_trials import WorkerTrials
from lightning_parallel.ranks.memory import MemoryUse
from tests.jobs.meters import heard
from tests.jobs.positions import Layer
from tests.parity import trainer_for

# What evidence comes to ---------------------------------------------------------------------------------------------

USUAL = {"data": 0.005, "copy": 0.002, "forward": 0.03, "backward": 0.06, "optimizer": 0.003}
MIB = 2**20


@pytest.mark.parametrize(
    ("found", "name", "words"),
    [
        ({}, None, ""),
        (
            {"seconds": {**USUAL, "data": 0.105}},
            "data",
            "Without it an update takes 95 ms in place",
        ),
        ({"seconds": {**USUAL, "copy": 0.102}}, "copies", "pin_memory=True and take DevicePrefetch"),
        ({"seconds": {**USUAL, "copy": 0.102}, "copies_aside": True}, "copies", "smaller dtypes"),
        ({"exposed": [0.05, 0.02], "gradient_bytes": 400 * MIB}, "communication", "takes 20% of an update. Without it"),
        ({"exposed": [0.05, 0.001], "gradient_bytes": 400 * MIB}, None, ""),  # the first rank waits for the other one
        ({"exposed": [0.06, 0.05], "gradient_bytes": MIB}, "too small", "so that 8 ranks do the work of 4. Without"),
        ({"exposed": [0.06, 0.05], "gradient_bytes": MIB, "num_ranks": 1}, None, ""),
        ({"exposed": [0.06, 0.02], "gradient_bytes": MIB}, "communication", "Use fewer ranks, or a larger batch"),
        ({"straggler": Straggler(3, "forward", 0.08, 0.03)}, "slow rank", "Look at the machine of rank 3"),
        ({"straggler": Straggler(3, "data", 0.08, 0.03)}, "slow rank", "Look at what rank 3 reads"),
        ({"straggler": Straggler(3, "forward", 0.036, 0.03)}, None, ""),
        ({"retries": 2, "seconds": {**USUAL, "data": 0.105}}, "memory", "tried again, 2 times. Take recompute"),
        ({"straggler": Straggler(3, "forward", 0.08, 0.03), "exposed": [0.02] * 8}, "slow rank", "rank 3"),
        ({"throttling": Throttling(5, 0.8, 0.6)}, "throttled", "Without it an update takes 60 ms in place of 100 ms"),
        ({"throttling": Throttling(5, 0.8, math.nan)}, "throttled", "throttled in 80% of the time. Look at its"),
        ({"throttling": Throttling(5, 0.8, 0.97)}, None, ""),
        ({"throttling": Throttling(5, 0.02, 0.6)}, None, ""),
    ],
)
def test_what_costs_most_is_said(found: dict[str, Any], name: str | None, words: str) -> None:
    evidence = Evidence(**{"seconds": USUAL, "num_ranks": 8, **found})
    said = verdict(evidence, on_communication="Take a larger batch")
    assert (said and said.name) == name
    assert words in str(said)


def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
    kind = SimpleNamespace(name=device)
    return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=kind)


def test_communication_that_nothing_hides() -> None:
    host = [event("aten::mm", 0, 10), event("gloo:all_reduce", 5, 30), event("aten::add", 12, 15), event("Step", 0, 99)]
    kernels = [event("ncclDevKernel_AllReduce", 0, 50, "CUDA"), event("sgemm", 10, 30, "CUDA")]
    assert exposed_seconds([*host, *kernels], on_device=False) == pytest.approx(17e-6)
    assert exposed_seconds([*host, *kernels], on_device=True) == pytest.approx(30e-6)
    assert merged([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert without([(0, 10), (20, 30)], [(-1, 1), (3, 4), (9, 22), (29, 40)]) == [(1, 3), (4, 9), (22, 29)]
    assert without([(0, 2)], []) == [(0, 2)]


# Real runs ----------------------------------------------------------------------------------------------------------


class Samples(Dataset[Tensor]):
    """Random numbers, of which each takes some time."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.numbers = seconds, torch.randn(64, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds)
        return self.numbers[index]


class Sleeps(L.LightningModule):
    """A small model; a step takes as long as `seconds` say for this rank."""

    def __init__(self, *seconds: float, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(layers)))
        self.seconds = seconds

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        time.sleep(self.seconds[min(rank, len(self.seconds) - 1)])
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Said = tuple[list[str], list[str], list[float]]


def examined(
    strategy: str, size: int, seconds: tuple[float, ...], of_sample: float = 0.0, layers: int = 4, *also: Any
) -> Said:
    """Names of the verdicts, what was said, and weights behind 11 steps."""
    L.seed_everything(3, verbose=False)
    look, module = Doctor(every=3), Sleeps(*seconds, layers=layers)
    trainer = trainer_for(strategy, size, callbacks=[look, *also], max_steps=11, max_epochs=-1)
    with heard() as said:
        trainer.fit(module, DataLoader(Samples(of_sample), batch_size=2, shuffle=True))
    weights = [float(each.detach().sum()) for each in module.parameters()] + [float(torch.rand(()))]
    return [each.name for each in look.verdicts], [each for each in said if each.startswith("Doctor")], weights


def test_a_slow_data_set(ranks: Any) -> None:
    (names, said, weights), (other_names, silent, _) = ranks(2).run(examined, "ddp_custom", 2, (0.02,), 0.03)
    assert names == other_names
    assert set(names) == {"data"}
    assert silent == []
    assert "waiting for data takes" in said[0]
    assert "num_workers=" in said[0]
    # Neither the look nor the trial of workers has changed a number.
    assert weights == ranks(2).run(plain, "ddp_custom", 2)[0]


def plain(strategy: str, size: int) -> list[float]:
    L.seed_everything(3, verbose=False)
    module = Sleeps(0.0)
    trainer = trainer_for(strategy, size, max_steps=11, max_epochs=-1)
    trainer.fit(module, DataLoader(Samples(), batch_size=2, shuffle=True))
    return [float(each.detach().sum()) for each in module.parameters()] + [float(torch.rand(()))]


def test_a_slow_rank_and_a_healthy_run(ranks: Any) -> None:
    pool = ranks(2)
    (names, said, _), (other_names, silent, _) = pool.run(examined, "ddp_custom", 2, (0.03, 0.2))
    assert names == other_names
    assert names[-1] == "slow rank"  # in the second window, as one may be a short spell
    assert "rank 1 is slow" in said[-1]
    assert silent == []
    (names, said, _), _ = pool.run(examined, "ddp_custom", 2, (0.4,))
    assert (names, said) == ([], [])


def test_a_tiny_model(ranks: Any) -> None:
    """Each of 24 layers is gathered twice and reduced once, and computes next to nothing."""
    (names, said, _), (other_names, silent, _) = ranks(2).run(examined, "fsdp_custom", 2, (0.0,), 0.0, 24)
    assert names == other_names
    assert "too small" in names
    assert "the model is too small for 2 ranks" in "".join(said)
    assert silent == []


def test_under_a_pipeline(ranks: Any) -> None:
    """Nobody is blamed for waiting, and all ranks come to the same."""
    (names, _, _), (others, silent, _) = ranks(2).run(examined, "pp_custom", 2, (0.0,))
    assert names == others
    assert "slow rank" not in names
    assert silent == []


def test_windows_are_those_of_a_step_breakdown() -> None:
    breakdown = StepBreakdown(every=5)
    with mock.patch.object(doctor, "tune_workers", return_value=WorkerTrials({1: 1e9})):
        names, said, _ = examined("auto", 1, (0.01,), 0.02, 4, breakdown)
    assert names == ["data"] * 2  # one of StepBreakdown's own windows after another
    assert breakdown.listeners == []
    assert said[0].endswith("give num_workers=1.")
    assert breakdown.latest["breakdown/data"] > 0.5


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ({1: 1.0, 2: 1.5}, "more do not help; let the data set do less"),
        (RuntimeError("cannot pickle"), "More workers could not be tried: RuntimeError: cannot pickle"),
    ],
)
def test_workers_that_do_not_help(trials: Any, words: str) -> None:
    found = {"side_effect": trials} if isinstance(trials, Exception) else {"return_value": WorkerTrials(trials)}
    with mock.patch.object(doctor, "tune_workers", **found) as tried:
        _, said, _ = examined("auto", 1, (0.01,), 0.02)
    assert words in said[0]
    assert tried.call_count == 1


def test_retries_of_the_allocator_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = iter([MemoryUse(1.0, 1.0, 3.0), *[MemoryUse(1.0, 1.0, 3.0)] * 2, MemoryUse(1.0, 1.0, math.nan)])
    monkeypatch.setattr(MemoryUse, "of", classmethod(lambda cls, device: next(uses)))
    names, said, _ = examined("auto", 1, (0.05,))
    assert (names[0], names.count("memory")) == ("memory", 1)
    assert "3 times" in said[0]


def test_the_users_own_profiler_and_utilization() -> None:
    look = Doctor(every=2)
    meters = [Throughput(every=1, peak=1e9), look]
    trainer = trainer_for("auto", 1, callbacks=meters, max_steps=5, profiler=PyTorchProfiler(emit_nvtx=False))
    assert doctor._is_profiled(trainer)
    trainer = trainer_for("auto", 1, callbacks=meters, max_steps=6)
    with heard() as said, mock.patch.object(doctor, "tune_workers", return_value=WorkerTrials({1: 1e9})):
        trainer.fit(Sleeps(0.01), DataLoader(Samples(0.02), batch_size=2))
    assert "(MFU " in "".join(said)


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"Doctor\(every=0\) is no number of updates") as caught:
        Doctor(every=0, slower=0)
    assert len(caught.value.violations) == 2


class Slowed(Doctor):
    """Its profile takes long."""

    def on_train_batch_start(self, *args: Any) -> None:
        super().on_train_batch_start(*args)
        if self._profile is not None:
            time.sleep(1.0)


def counted(strategy: str, size: int) -> list[float]:
    """Seconds of steps, as one that hears windows sees them, and their number."""
    seen: list[float] = []
    breakdown = StepBreakdown(every=3)
    breakdown.listeners.append(lambda trainer, window: seen.append(window.step))
    trainer = trainer_for(strategy, size, callbacks=[breakdown, Slowed()], max_steps=8, max_epochs=-1)
    trainer.fit(Sleeps(0.0), DataLoader(Samples(), batch_size=2))
    return seen


def test_the_profiled_update_is_left_out(ranks: Any) -> None:
    """The first one, three, the profiled one, three."""
    for seen in ranks(2).run(counted, "ddp_custom", 2):
        assert len(seen) == 2
        assert max(seen) < 0.3
