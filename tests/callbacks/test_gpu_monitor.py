"""`GpuMonitor` against an NVML made up here, on the host, and with the loggers of Lightning."""

from __future__ import annotations

import copy
import io
import math
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from rich.console import Console
from rich.live import Live

from lightning_parallel import ConfigurationError
from lightning_parallel.callbacks import Doctor, GpuMonitor, gpu_monitor
from lightning_parallel.callbacks.monitor_table import LiveTable, build_table
from lightning_parallel.callbacks.nvml_device import NVML_NAMES, NvmlDevice, UnavailableError, open_nvml
from lightning_parallel.callbacks.sampler import Sampler
from tests.data import loader
from tests.jobs.meters import Noted, heard
from tests.models.cases import ByteGPT
from tests.names import num_readers
from tests.parity import trainer_for

GIB = 2**30
UUID = "a-b-c"


class NVMLError(Exception):
    pass


class FakeNvml(ModuleType):
    """The functions that are called, of one GPU of Hopper's kind, or of a MIG instance of one."""

    NVMLError, NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_GPM_METRICS_GET_VERSION = NVMLError, 0, 1, 1

    def __init__(self, kind: str = "GPU", refuses: tuple[str, ...] = ()) -> None:
        super().__init__("pynvml")
        self.kind, self.refuses, self.num_open, self.num_samples, self.reasons = kind, refuses, 0, 0, 0x4 | 0x40

    def __getattribute__(self, name: str) -> Any:
        if name in object.__getattribute__(self, "refuses"):
            raise NVMLError("Not Supported") if name == "nvmlInit" else AttributeError(name)
        return super().__getattribute__(name)

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != f"{self.kind}-{UUID}":
            raise NVMLError("Not Found")
        return self.kind

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> bool:
        return handle == "MIG"

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "GPU"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if handle == "MIG":
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=83)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used={"GPU": 40, "MIG": 5}[handle] * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        assert handle == "GPU"
        return 650_000

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 71

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 990

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: str) -> int:
        return 0x1

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> Any:
        return SimpleNamespace(isSupportedDevice=True)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.num_samples += 1
        return SimpleNamespace(at=0)

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.num_samples -= 1

    def nvmlGpmSampleGet(self, handle: str, sample: Any) -> None:
        assert handle == "GPU"
        sample.at = time.perf_counter()

    def nvmlGpmMigSampleGet(self, handle: str, instance: int, sample: Any) -> None:
        assert instance == 7
        sample.at = time.perf_counter()

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(), SimpleNamespace()])

    def nvmlGpmMetricsGet(self, wanted: Any) -> None:
        assert wanted.sample1.at < wanted.sample2.at
        for metric in wanted.metrics:
            metric.value = {2: 66.0, 5: 41.0}[metric.metricId]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    return torch.device("cuda", 0)


def opened(monkeypatch: pytest.MonkeyPatch, cuda: torch.device, *args: Any) -> tuple[NvmlDevice, FakeNvml]:
    nvml = FakeNvml(*args)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    return open_nvml(cuda), nvml


FIGURES = {
    "utilization": 83,
    "sm_active": 66,
    "tensor_active": 41,
    "memory_gib": 40,
    "power_watts": 650,
    "temperature": 71,
    "clock_percent": 50,
    "power_capped": 1,
    "throttled": 1,
}


def test_figures_of_a_gpu(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    device, nvml = opened(monkeypatch, cuda)
    for _ in range(2):
        assert dict(zip(NVML_NAMES, device.read(), strict=True)) == FIGURES
    assert device.missing == []
    nvml.reasons = 0x1
    assert device.read()[-2:] == [0, 0]
    device.close()
    assert (nvml.num_open, nvml.num_samples) == (0, 0)


def test_figures_of_a_mig_instance(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    device, _ = opened(monkeypatch, cuda, "MIG")
    found = dict(zip(NVML_NAMES, device.read(), strict=True))
    assert math.isnan(found.pop("utilization"))
    assert found == {name: 5 if name == "memory_gib" else FIGURES[name] for name in found}
    assert device.missing == ["utilization"]


def test_what_a_driver_does_not_offer(monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> None:
    older = ("nvmlGpmQueryDeviceSupport", "nvmlDeviceGetCurrentClocksEventReasons")
    device, _ = opened(monkeypatch, cuda, "GPU", older)
    assert device.missing == ["sm_active", "tensor_active"]
    found = dict(zip(NVML_NAMES, device.read(), strict=True))
    assert found["throttled"] == 0  # as the older function says
    assert math.isnan(found["sm_active"])


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (None, r"needs nvidia-ml-py; pip install lightning_parallel\[monitor\]"),
        (FakeNvml("GPU", ("nvmlInit",)), "could not be used: Not Supported"),
        (FakeNvml("other"), "does not find the GPU a-b-c: Not Found"),
    ],
)
def test_nvml_that_is_missing_or_refused(
    monkeypatch: pytest.MonkeyPatch, cuda: torch.device, module: Any, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    with pytest.raises(UnavailableError, match=words):
        open_nvml(cuda)
    assert module is None or module.num_open == 0


# Fits ---------------------------------------------------------------------------------------------------------------


class FakeHost(ModuleType):
    """psutil, with figures made up here."""

    Error = OSError

    class Process:
        def cpu_percent(self, interval: None) -> float:
            return 150.0

        def memory_info(self) -> Any:
            return SimpleNamespace(rss=3 * GIB)

    def cpu_percent(self, interval: None) -> float:
        return 75.0

    def virtual_memory(self) -> Any:
        return SimpleNamespace(percent=12.5)


HOST = {"process_cpu_percent": 150, "process_memory_gib": 3, "host_cpu_percent": 75, "host_memory_percent": 12.5}


def monitored(strategy: str, size: int) -> tuple[dict[str, float], list[str], list[Any], int]:
    """What a fit logged in the end, said and gave to its logger, and the number of the monitor's threads behind it."""
    sys.modules["psutil"] = FakeHost("psutil")
    meter, logger = GpuMonitor(every=3, seconds=0.01), Noted("monitor/")
    with heard() as said:
        trainer = trainer_for(strategy, size, callbacks=[meter], logger=logger)
        trainer.fit(ByteGPT(), loader(num_readers(strategy, size) if size > 1 else 1, 4))
    del sys.modules["psutil"]
    own = [each for each in said if each.startswith("GpuMonitor")]
    return meter.latest, own, logger.rows, meter._sampler is not None


def test_the_host_of_each_rank(ranks: Any) -> None:
    results = ranks(2).run(monitored, "ddp_custom", 2)
    expected = {f"monitor/rank{rank}/{name}": value for rank in (0, 1) for name, value in HOST.items()}
    for rank, (latest, said, rows, is_running) in enumerate(results):
        assert latest == expected
        assert said == (["GpuMonitor: NVML knows nothing of cpu: it is for NVIDIA's GPUs"] if rank == 0 else [])
        assert [step for step, _ in rows] == ([2, 3] if rank == 0 else [])
        assert not is_running


@pytest.mark.parametrize("build", [CSVLogger, TensorBoardLogger])
def test_loggers_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Any) -> None:
    monkeypatch.setitem(sys.modules, "psutil", FakeHost("psutil"))
    logger = build(tmp_path, name="run", version=0)
    trainer_for("auto", 1, callbacks=[GpuMonitor(every=2)], logger=logger).fit(ByteGPT(), loader(1, 4))
    (written,) = [each for each in (tmp_path / "run").rglob("*") if each.name.startswith(("metrics.csv", "events"))]
    assert b"monitor/rank0/process_memory_gib" in written.read_bytes()


def test_without_any_source_the_fit_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with heard() as said:
        meter = GpuMonitor(every=1, table=True)
        for _ in range(2):
            trainer_for("auto", 1, callbacks=[meter]).fit(ByteGPT(), loader(1, 2))
    own = [each for each in said if each.startswith("GpuMonitor")]
    assert len(own) == 2
    assert "need psutil; pip install lightning_parallel[monitor]" in own[1]
    assert meter.latest == {}


def test_a_reading_that_fails_later_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", FakeHost("psutil"))
    monkeypatch.setattr(FakeHost, "virtual_memory", lambda self: SimpleNamespace(percent=next(left)))
    left = iter([1.0])
    with heard() as said:
        meter = GpuMonitor(every=1, seconds=0.001)
        trainer_for("auto", 1, callbacks=[meter]).fit(Waits(), loader(1, 4))
    assert sum("figures could not be read any more: StopIteration" in each for each in said) == 1


class Waits(ByteGPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.05)
        return super().training_step(batch, batch_idx)


def test_a_thread_reads_once_a_while_and_a_copy_has_none() -> None:
    calls: list[float] = []

    def read() -> list[float]:
        calls.append(time.perf_counter())
        return [float(len(calls))]

    sampler = Sampler(read, 0.02)
    time.sleep(0.2)
    assert copy.deepcopy(sampler) is None
    assert sampler.stop()
    assert 2 <= len(calls) <= 10
    assert sampler.taken() == [[float(number + 1)] for number in range(len(calls))]
    assert sampler.read_once() == [[float(len(calls))]]


def test_means_and_peaks() -> None:
    rows = [dict.fromkeys(gpu_monitor.NAMES, math.nan) for _ in range(3)]
    for row, memory, busy in zip(rows, (1.0, 5.0, 2.0), (10.0, 20.0, math.nan), strict=True):
        row |= {"memory_gib": memory, "utilization": busy}
    found = dict(zip(gpu_monitor.NAMES, gpu_monitor.pooled([list(row.values()) for row in rows]), strict=True))
    assert (found["memory_gib"], found["utilization"]) == (5, 15)
    assert math.isnan(found["temperature"])


def test_the_table_is_compact_and_stands_below_another_live_one() -> None:
    names, rows = ("utilization", "throttled", "memory_gib"), [[83.0, math.nan, 40.25], [7.0, math.nan, 1.0]]
    screen = io.StringIO()
    LiveTable(Console(file=screen, width=60)).show(build_table(names, rows))  # no terminal: one below the other
    text = screen.getvalue()
    assert "throttled" not in text
    assert "memory gib" in text
    assert "40.25" in text
    console = Console(file=io.StringIO(), force_terminal=True, width=60)
    live = LiveTable(console)
    for _ in range(2):
        live.show(build_table(names, rows))
    live.close()
    with Live(console=console):
        live.show(build_table(names, rows))
        live.close()


class Throttled(GpuMonitor):
    """Tells that the device of rank 0 runs at half of its clock."""

    def on_train_batch_start(self, *args: Any) -> None:
        self.latest = {"monitor/rank0/throttled": 0.8, "monitor/rank0/clock_percent": 50.0}


def test_the_doctor_hears_of_a_throttled_device() -> None:
    look = Doctor(every=3)
    trainer_for("auto", 1, callbacks=[Throttled(), look]).fit(ByteGPT(), loader(1, 8))
    assert {each.name for each in look.verdicts} == {"throttled"}
    assert "the device of rank 0 is throttled in 80% of the time, and runs at 50% of its clock" in look.said[0]


def test_arguments() -> None:
    with pytest.raises(ConfigurationError, match=r"every=0\) is no number of updates") as caught:
        GpuMonitor(every=0, seconds=0)
    assert len(caught.value.violations) == 2
