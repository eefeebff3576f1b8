"""`StepBreakdown`: made-up slow parts are found in their phases, and a made-up slow rank is named."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import SimpleProfiler
from torch.utils.data import DataLoader, default_collate

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks import StepBreakdown, Throughput, metered_steps
from lightning_parallel.callbacks.fit_summary import GIB, Fit, FitTotals
from lightning_parallel.callbacks.step_clock import HostClock
from lightning_parallel.callbacks.step_phases import JOINED, StepPhases
from lightning_parallel.presets import PRESETS
from lightning_parallel.ranks.memory import MemoryUse
from tests.data import data_of, loader
from tests.jobs.meters import Long, Noted, Ticks, heard, spend
from tests.models.cases import ByteGPT
from tests.names import num_ranks, num_readers
from tests.parity import trainer_for

SLOW = {"data": 1.0, "copy": 2.0, "forward": 4.0, "backward": 8.0, "optimizer": 16.0, "checkpoint": 32.0}
"""Seconds that each phase of `Slow` takes."""


class SlowSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        spend(SLOW["optimizer"])
        return loss


class Slow(ByteGPT):
    """Takes long in the copy, forward, backward and the optimizer."""

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        spend(SLOW["copy"])
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        spend(SLOW["forward"])
        return Long.apply(super().training_step(batch, batch_idx), SLOW["backward"])

    def configure_optimizers(self) -> Any:
        return SlowSGD(self.parameters(), lr=0.1)


class SlowManual(Slow):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def slow_collate(samples: Any) -> Any:
    spend(SLOW["data"])
    return default_collate(samples)


class Save(L.Callback):
    """Writes a checkpoint after each batch, and takes some time beside it."""

    def on_save_checkpoint(self, *args: Any) -> None:
        spend(SLOW["checkpoint"])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        spend(64)
        trainer.save_checkpoint("slow.ckpt")


def broken_down(strategy: str, size: int, make: Any = Slow, microsteps: int = 1) -> tuple[dict[str, float], list[str]]:
    """Seconds of each phase in three updates of a slow module, of which the last two are timed, and the summary."""
    L.seed_everything(3, verbose=False)
    readers = 1 if strategy == "auto" else num_readers(strategy, size)
    data = DataLoader(data_of("byte_gpt", 3 * microsteps * 8 * readers, 8), batch_size=8, collate_fn=slow_collate)
    meter = StepBreakdown(every=2)
    with heard() as said, mock.patch.object(metered_steps, "build_clock", return_value=Ticks()):
        trainer_for(strategy, size, callbacks=[meter], accumulate_grad_batches=microsteps).fit(make(), data)
    found = {name.removeprefix("breakdown/"): value for name, value in meter.latest.items() if "breakdown" in name}
    seconds = found.pop("step_seconds")
    assert sum(found.values()) == pytest.approx(1)
    lines = [line for message in said if "fit took" in message for line in message.splitlines()]
    return {name: pytest.approx(share * seconds) for name, share in found.items()}, lines


CASES = [
    ("auto", 1, Slow, 1),
    ("auto", 1, SlowManual, 1),
    ("auto", 1, Slow, 2),
    ("ddp_custom", 2, Slow, 1),
    ("ddp_custom", 2, SlowManual, 1),
    ("fsdp_custom", 2, Slow, 2),
    ("pp_custom", 2, Slow, 1),
]
KNOWN = {case[0] for case in CASES}
CASES += [(name, 1 if name == "dp_custom" else num_ranks(name), Slow, 1) for name in PRESETS if name not in KNOWN]


@pytest.mark.parametrize(("name", "size", "make", "microsteps"), CASES)
def test_slow_parts_are_found_in_their_phases(ranks: Any, name: str, size: int, make: Any, microsteps: int) -> None:
    if size == 1:
        results = [broken_down(name, 1, make, microsteps)]
    else:
        results = ranks(size).run(broken_down, name, size, make, microsteps)
    expected = {phase: seconds * (1 if phase == "optimizer" else microsteps) for phase, seconds in SLOW.items()}
    expected |= {"checkpoint": 0.0, "other": 0.0}
    if name == "pp_custom":
        # Each of two ranks runs four microbatches, and one of them goes backward through their losses.
        expected[JOINED] = 4 * (expected.pop("forward") + expected.pop("backward") / 2)
        expected["bubble"] = 0.0  # in which no time goes by here; test_pipeline_bubble.py has real waits
    assert [phases for phases, _ in results] == [expected] * size
    lines, *silent = [lines for _, lines in results]
    assert silent == [[]] * (size - 1)
    readers = 1 if name == "auto" else num_readers(name, size)
    update, samples = sum(expected.values()), 8 * microsteps * readers
    assert len(lines) == 5
    assert lines[0].endswith(f"for 3 updates on {size} device{'s' * (size > 1)}")
    assert lines[1] == f"  samples: {samples / update:.4g} a second, {update:.3g} s an update"
    largest = sorted(expected.items(), key=lambda item: -item[1])
    assert lines[3] == "  time: " + ", ".join(f"{phase} {each / update:.1%}" for phase, each in largest if each)
    assert lines[4] == "  checkpoint: none"


def test_checkpoints_and_other_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metered_steps, "build_clock", lambda device: Ticks())
    meter = StepBreakdown(every=2)
    trainer_for("auto", 1, callbacks=[meter, Save()]).fit(ByteGPT(), loader(1, 5))
    assert meter.latest["breakdown/step_seconds"] == pytest.approx(96)
    assert meter.latest["breakdown/checkpoint"] == pytest.approx(1 / 3)
    assert meter.latest["breakdown/other"] == pytest.approx(2 / 3)


def test_what_the_summary_says(tmp_path: Path) -> None:
    written = ModelCheckpoint(dirpath=tmp_path, filename="kept")
    with heard() as said:
        trainer_for("auto", 1, callbacks=[StepBreakdown(), written], enable_checkpointing=True).fit(
            ByteGPT(), loader(1, 3)
        )
    (summary,) = [each for each in said if "fit took" in each]
    assert re.fullmatch(
        r"StepBreakdown: fit took [\d.]+ s for 3 updates on 1 device\n"
        r"  samples: [\d.]+ a second, [\de.-]+ s an update\n"
        r"  memory: at most [\d.]+ GiB in a process\n"
        r"  time: \w+ [\d.]+%, .*\n"
        rf"  checkpoint: {tmp_path}/kept.ckpt",
        summary,
    )
    totals = FitTotals()
    assert "not timed" in totals.summary(Fit(3723.4, 1, 8), "")
    totals.add(2, float("nan"), {"data": 1.0, "forward": 3.0}, MemoryUse(3 * GIB, 4 * GIB, 5))
    assert totals.summary(Fit(3723.4, 1, 8), "").splitlines() == [
        "fit took 1 h 2 min 3 s for 1 update on 8 devices",
        "  samples: their number is not known, 4 s an update",
        "  memory: at most 3 GiB allocated and 4 GiB reserved on a device, 5 retries",
        "  time: forward 75.0%, data 25.0%",
        "  checkpoint: none",
    ]


def test_phases_inside_of_each_other() -> None:
    phases = StepPhases(Ticks(), joins=False)
    phases.begin("optimizer")
    spend(1)
    phases.begin("forward")
    spend(2)
    phases.begin("data")
    spend(4)
    phases.end("data")
    phases.end("forward")
    phases.begin("backward")
    phases.begin("other")
    phases.end("backward")  # the hook in which it ends
    phases.end("other")
    phases.begin("backward")  # an error leaves it
    spend(8)
    phases.pause()
    phases.begin("data")
    spend(16)
    phases.end("data")
    phases.resume()
    phases.end("optimizer")
    spend(32)
    phases.begin("copy")
    phases.end_all()
    spend(64)
    assert phases.cut().seconds() == {"optimizer": 1, "forward": 2, "data": 4, "backward": 8, "copy": 0, "other": 96}
    spend(1)
    assert phases.cut().seconds() == {"other": 1}


class Behind(HostClock):
    """A device that is three marks behind its host."""

    runs_behind = True

    def __init__(self) -> None:
        self.num_marks, self.is_waited_for = 0, 0

    def mark(self) -> Any:
        self.num_marks += 1
        return self.num_marks

    def is_over(self, mark: Any) -> bool:
        return bool(mark <= self.num_marks - 3)

    def wait(self, mark: Any) -> None:
        self.is_waited_for += not self.is_over(mark)


def test_nothing_waits_for_a_device_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, logger = Behind(), Noted("breakdown/")
    monkeypatch.setattr(metered_steps, "build_clock", lambda device: clock)

    class Watch(L.Callback):
        def on_train_end(self, *args: Any) -> None:
            assert clock.is_waited_for == 0

    trainer_for("auto", 1, callbacks=[Watch(), StepBreakdown(every=2)], logger=logger).fit(ByteGPT(), loader(1, 6))
    assert clock.is_waited_for > 0
    assert [step for step, _ in logger.rows] == [2, 4, 5]


class ValidatesLong(ByteGPT):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        time.sleep(0.3)


class Fails(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("as asked")
        return super().training_step(batch, batch_idx)


def test_the_users_profiler_works_and_is_given_back(capsys: pytest.CaptureFixture[str]) -> None:
    own = SimpleProfiler()
    meters = [StepBreakdown(every=2), Throughput(every=2), StepBreakdown(every=3)]
    trainer = trainer_for("auto", 1, callbacks=meters, profiler=own, val_check_interval=2)

    def heard(module: L.LightningModule) -> None:
        assert module.trainer.profiler.recorded_durations is own.recorded_durations

    module = ValidatesLong()
    module.on_train_epoch_end = lambda: heard(module)  # type: ignore[method-assign]
    trainer.fit(module, loader(1, 8), loader(1, 1))
    assert trainer.profiler is own
    assert len(own.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == 8
    assert meters[0].latest["breakdown/step_seconds"] < 0.15  # validation is none of it
    assert meters[0].latest["memory/peak_gib"] > 0.01
    trainer = trainer_for("auto", 1, callbacks=[StepBreakdown()], profiler=own)
    with pytest.raises(RuntimeError, match="as asked"):
        trainer.fit(Fails(), loader(1, 4))
    assert trainer.profiler is own


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"every=0\) is no number of updates") as caught:
        StepBreakdown(every=0, slower=-0.1)
    assert len(caught.value.violations) == 2
