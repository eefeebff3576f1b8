"""States of random number generators, and streams: other numbers on ranks that read other samples, also on resume."""

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
        device: That of one accelerator; ``None`` without one.
        python: That of `random`.
        numpy: That of `numpy.random`.
    """

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """The state now, on a rank with `device`; of the host's generators alone, where that is the host."""
        on_device = torch.get_device_module(device).get_rng_state(device) if _is_seeded(device) else None
        return cls(torch.get_rng_state(), on_device, random.getstate(), np.random.get_state())

    def restore(self, device: torch.device) -> None:
        """Make it the state again."""
        torch.set_rng_state(self.host)
        if self.device is not None and _is_seeded(device):
            torch.get_device_module(device).set_rng_state(self.device, device)
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


@contextlib.contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """When this closes, every generator is where it was: what is drawn in here changes nothing outside.

    Args:
        device: This rank's device, or the host where nothing on a device draws.
    """
    state = RandomState.take(device)
    try:
        yield
    finally:
        state.restore(device)


def seed_generators(seed: int) -> None:
    """Seed every generator that code draws from without naming one."""
    _seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """In here, torch's generators of the host and of this device draw from `seed`; then they go on where they were.

    Around each layer of a step: those of `random` and `numpy` would cost more than the layers' own.
    """
    device = _used_accelerator()
    devices, kind = ([], "cuda") if device is None else ([device], device.type)
    with torch.random.fork_rng(devices=devices, device_type=kind):
        _seed_torch(seed)
        yield


def seed_of_part(seed: int, part: int) -> int:
    """The seed of the stream of one of several parts that share `seed`."""
    return (seed + part * _STRIDE) % 2**63


def data_rank_stream(data_rank: int, *, progress: int, device: torch.device) -> RandomState:
    """The beginning of a stream of one of the ranks that share a seed; what is drawn from now stays as it is.

    Args:
        data_rank: The place among the ranks that read different samples; peers that share samples share it, too.
        progress: How many updates there were: a run that resumes does not begin the stream again.
        device: This rank's device.
    """
    with unchanged_generators(device):
        seed_generators(seed_of_part(torch.initial_seed() + progress, data_rank + 1))
        return RandomState.take(device)


def _is_seeded(device: torch.device) -> bool:
    """Whether there is a generator for each device of this kind, beside the host's."""
    return device.type not in ("cpu", "mps", "meta")


def _used_accelerator() -> torch.device | None:
    """The accelerator on which this process draws; `None` where it has used none yet."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not _is_seeded(accelerator):
        return None
    if not torch.get_device_module(accelerator).is_initialized():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _seed_torch(seed: int) -> None:
    """`torch.manual_seed`, but for the stack of its caller, which that notes for each kind of device never used."""
    torch.default_generator.manual_seed(seed)
    if (device := _used_accelerator()) is not None:
        torch.get_device_module(device).manual_seed_all(seed)
