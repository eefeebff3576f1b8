"""Scaling that others have published, to see measured scaling beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """Weak scaling: the same batch for each device.

    Args:
        name: What was measured, and on what.
        source: Where it stands.
        rates: Number of devices -> tokens per second and device.
    """

    name: str
    source: str
    rates: Mapping[int, float]

    @property
    def efficiencies(self) -> dict[float, float]:
        """Devices, in multiples of the smallest number -> the rate of a device, as a share of that on the smallest."""
        smallest = min(self.rates)
        return {number / smallest: rate / self.rates[smallest] for number, rate in self.rates.items()}


PUBLISHED = (
    Published(
        "FSDP, 13 B parameters, 8 to 64 H100",
        "MosaicML, llm-foundry, scripts/train/benchmarking (MPT 13b, 2048 tokens, microbatches of 2)",
        {8: 4792, 16: 4767, 32: 4811, 64: 4800},
    ),
    Published(
        "FSDP, 1 B parameters, 16 to 64 H100",
        "MosaicML, llm-foundry, scripts/train/benchmarking (MPT 1b, 2048 tokens, microbatches of 20)",
        {16: 46037, 32: 45130, 64: 44402},
    ),
    Published(
        "DDP, 8 to 256 GPUs",
        "Hugging Face, The Ultra-Scale Playbook (2025), scaling of data parallelism, the same memory each",
        {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38},
    ),
)
