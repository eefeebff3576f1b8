"""Streams of random numbers: different on ranks that read different samples, and the same again on resume. Layer 1."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_STRIDE = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: multiples of it are far apart, so that seed + 1 on one rank is not seed on the next."""


@dataclass(frozen=True)
class RandomState:
    """The state of every generator that code draws from without naming one.

    Args:
        host: torch's generator of the host.
        device: That of the accelerator; ``None`` without one.
        python: That of `random`.
        numpy: That of `numpy.random`.
    """

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """The state now, on a rank with `device`."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device, random.getstate(), np.random.get_state())

    def restore(self, device: torch.device) -> None:
        """Make it the state again."""
        torch.set_rng_state(self.host)
        if self.device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.device, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def to_plain(self) -> dict[str, Any]:
        """The same in types that any checkpoint may hold."""
        version, numbers, gauss = self.python
        name, keys, *rest = self.numpy
        return {
            "host": self.host,
            "device": self.device,
            "python": [version, list(numbers), gauss],
            "numpy": [str(name), torch.from_numpy(keys.astype(np.int64)), *(float(value) for value in rest)],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> RandomState:
        """What `to_plain` returned."""
        version, numbers, gauss = plain["python"]
        name, keys, position, has_gauss, cached = plain["numpy"]
        numpy = (name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached)
        return cls(plain["host"], plain["device"], (version, tuple(numbers), gauss), numpy)


def seed_generators(seed: int) -> None:
    """Seed torch's generators of the host and of devices in use: `torch.manual_seed`, but for what it costs.

    That one also notes the stack of its caller for each kind of device that was never used.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """In here, torch's generators of the host and of this device draw from `seed`; then they go on where they were."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        seed_generators(seed)
        yield


def seed_of_part(seed: int, part: int) -> int:
    """The seed of the stream of one of several parts that share `seed`."""
    return (seed + part * _STRIDE) % 2**63


def own_stream(data_rank: int, *, progress: int, device: torch.device) -> RandomState:
    """The beginning of a stream of one of the ranks that share a seed; what is drawn from now stays as it is.

    Args:
        data_rank: The place among the ranks that read different samples; peers that share samples share it, too.
        progress: How many updates there were: a run that resumes does not begin the stream again.
        device: This rank's device.
    """
    shared = RandomState.take(device)
    seed = seed_of_part(torch.initial_seed() + progress, data_rank + 1)
    torch.manual_seed(seed)  # every device's generator, too
    random.seed(seed)
    np.random.seed(seed % 2**32)
    own = RandomState.take(device)
    shared.restore(device)
    return own
