"""Figures of one GPU, or of one MIG instance, by NVIDIA's management library."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from lightning_parallel.callbacks.fit_summary import GIB

NVML_NAMES = (
    "utilization",
    "sm_active",
    "tensor_active",
    "memory_gib",
    "power_watts",
    "temperature",
    "clock_percent",
    "power_capped",
    "throttled",
)
"""Percent of time, GiB, watts, degrees Celsius; the last two are 1 while it is so, and 0 otherwise."""
_CAPPED = 0x4
_THROTTLED = 0x8 | 0x20 | 0x40 | 0x80
"""Bits of NVML: power cap; slowdown by hardware, heat as software and as hardware see it, and the power brake."""
_SM_UTILIZATION, _ANY_TENSOR = 2, 5
"""Numbers of the metrics of NVML's GPM, which Hopper and later ones have."""


class Source(Protocol):
    """A source of figures."""

    names: tuple[str, ...]
    missing: list[str]
    """Those that it does not have here."""

    def read(self) -> list[float]:
        """A figure for each name; not a number where it is missing. Called in a thread."""

    def close(self) -> None:
        """End it."""


class UnavailableError(Exception):
    """A source that is not there, with the reason."""


class NvmlDevice:
    """The figures of a GPU or a MIG instance. One that the driver does not offer is missing.

    Power, temperature, clocks and throttling are those of the whole GPU also for a MIG instance.

    Args:
        nvml: The module ``pynvml``, initialized.
        device: The device of this rank.

    Raises:
        UnavailableError: If NVML does not know the device.
    """

    names: tuple[str, ...] = NVML_NAMES

    def __init__(self, nvml: Any, device: torch.device) -> None:
        self._nvml, self._handle = nvml, _handle(nvml, device)
        self._gpu, self._instance = self._handle, None
        if nvml.nvmlDeviceIsMigDeviceHandle(self._handle):
            self._gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
            self._instance = nvml.nvmlDeviceGetGpuInstanceId(self._handle)
        self._samples: list[Any] = []
        self._queries: dict[str, Callable[[], float]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu,
            "memory_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(self._handle).used / GIB,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(self._gpu, nvml.NVML_TEMPERATURE_GPU),
            "clock_percent": self._clock,
            "power_capped": lambda: float(bool(self._reasons() & _CAPPED)),
            "throttled": lambda: float(bool(self._reasons() & _THROTTLED)),
        }
        self.missing: list[str] = []
        self._queries = {name: query for name, query in self._queries.items() if self._has(query)}
        self._has_activity = self._has(self._begin_activity)
        found = {*self._queries, *(("sm_active", "tensor_active") if self._has_activity else ())}
        self.missing = [name for name in self.names if name not in found]

    def _has(self, query: Callable[[], object]) -> bool:
        try:
            query()
        except (self._nvml.NVMLError, AttributeError):  # of the driver, and of an older module
            return False
        return True

    def read(self) -> list[float]:
        """A figure for each of `names`; not a number where it is missing, or could not be read this time."""
        found = dict.fromkeys(self.names, float("nan"))
        for name, query in self._queries.items():
            try:
                found[name] = float(query())
            except self._nvml.NVMLError:
                continue
        if self._has_activity:
            with contextlib.suppress(self._nvml.NVMLError):
                found["sm_active"], found["tensor_active"] = self._activity()
        return list(found.values())

    def close(self) -> None:
        """Give the library back."""
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)
        self._samples = []
        self._nvml.nvmlShutdown()

    def _clock(self) -> float:
        kind = self._nvml.NVML_CLOCK_SM
        now, highest = (
            self._nvml.nvmlDeviceGetClockInfo(self._gpu, kind),
            self._nvml.nvmlDeviceGetMaxClockInfo(self._gpu, kind),
        )
        return 100 * float(now) / float(highest)

    def _reasons(self) -> int:
        newer = getattr(self._nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        return int((newer or self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(self._gpu))

    # The activity of multiprocessors and tensor cores, as what has changed between two samples ----------------------

    def _begin_activity(self) -> None:
        if not self._nvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice:
            raise AttributeError
        self._samples = [self._nvml.nvmlGpmSampleAlloc(), self._nvml.nvmlGpmSampleAlloc()]
        self._take(self._samples[0])

    def _take(self, sample: Any) -> None:
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._gpu, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._gpu, self._instance, sample)

    def _activity(self) -> tuple[float, float]:
        before, after = self._samples
        self._take(after)
        wanted = self._nvml.c_nvmlGpmMetricsGet_t()
        wanted.version, wanted.numMetrics = self._nvml.NVML_GPM_METRICS_GET_VERSION, 2
        wanted.sample1, wanted.sample2 = before, after
        wanted.metrics[0].metricId, wanted.metrics[1].metricId = _SM_UTILIZATION, _ANY_TENSOR
        self._nvml.nvmlGpmMetricsGet(wanted)
        self._samples = [after, before]
        return wanted.metrics[0].value, wanted.metrics[1].value


def open_nvml(device: torch.device) -> NvmlDevice:
    """The figures of `device`.

    Raises:
        UnavailableError: If it is no NVIDIA GPU, NVML is not installed, or refuses.
    """
    if device.type != "cuda":
        raise UnavailableError(f"NVML knows nothing of {device.type}: it is for NVIDIA's GPUs")
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        raise UnavailableError("NVML needs nvidia-ml-py; pip install lightning_parallel[monitor]") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise UnavailableError(f"NVML could not be used: {error}") from None
    try:
        return NvmlDevice(nvml, device)
    except BaseException:
        nvml.nvmlShutdown()
        raise


def _handle(nvml: Any, device: torch.device) -> Any:
    """The handle of `device`; by its UUID, as numbers of devices are others where CUDA_VISIBLE_DEVICES is set."""
    uuid = torch.cuda.get_device_properties(device).uuid
    said: object = None
    for kind in ("GPU", "MIG"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
        except nvml.NVMLError as error:
            said = error
    raise UnavailableError(f"NVML does not find the GPU {uuid}: {said}")
