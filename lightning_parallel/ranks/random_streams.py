"""States of random number generators, and streams that differ between ranks which read different samples."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_STRIDE = 0x9E3779B97F4A7C15
"""2**64 over the golden ratio: multiples of it are far apart, so that seed + 1 on one rank is not seed on the next."""


@dataclass(frozen=True)
class RandomState:
    """The states of all default generators.

    Args:
        host: The state of torch's generator of the host.
        device: The state of one accelerator's; ``None`` without one.
        python: The state of `random`.
        numpy: The state of `numpy.random`.
    """

    host: Tensor
    device: Tensor | None
    python: Any
    numpy: Any

    @classmethod
    def take(cls, device: torch.device) -> RandomState:
        """Return the present state on a rank with `device`; without a device's generator, where that is the host."""
        on_device = torch.get_device_module(device).get_rng_state(device) if _is_seeded(device) else None
        return cls(torch.get_rng_state(), on_device, random.getstate(), np.random.get_state())

    def restore(self, device: torch.device) -> None:
        """Set all generators to this state."""
        torch.set_rng_state(self.host)
        if self.device is not None and _is_seeded(device):
            torch.get_device_module(device).set_rng_state(self.device, device)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def to_plain(self) -> dict[str, Any]:
        """The state in types that ``torch.load(weights_only=True)`` accepts."""
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
        """Return the state from which `to_plain` made `plain`."""
        version, numbers, gauss = plain["python"]
        name, keys, position, has_gauss, cached = plain["numpy"]
        numpy = (name, keys.numpy().astype(np.uint32), int(position), int(has_gauss), cached)
        return cls(plain["host"], plain["device"], (version, tuple(numbers), gauss), numpy)


@contextlib.contextmanager
def unchanged_generators(device: torch.device) -> Iterator[None]:
    """Restore every generator at the end, so that numbers drawn in this context change nothing outside.

    Args:
        device: This rank's device, or the host where nothing on a device draws.
    """
    state = RandomState.take(device)
    try:
        yield
    finally:
        state.restore(device)


def seed_generators(seed: int) -> None:
    """Seed all default generators."""
    _seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits only


@contextlib.contextmanager
def drawing_from(seed: int) -> Iterator[None]:
    """Let torch's generators of the host and of this device draw from `seed` here, and continue as before afterwards.

    It is used around each layer of a step, so `random` and `numpy` are left out: their states take longer to save than
    torch's.
    """
    device = _used_accelerator()
    devices, kind = ([], "cuda") if device is None else ([device], device.type)
    with torch.random.fork_rng(devices=devices, device_type=kind):
        _seed_torch(seed)
        yield


@contextlib.contextmanager
def drawing_aside(part: int) -> Iterator[Callable[[], bool]]:
    """Let torch draw from a seed that the present stream gives here; the stream itself stays where it is.

    Args:
        part: A number that tells parts of the same stream apart, such as that of a layer.

    Returns:
        A context, which gives a function that says whether any number was drawn in it.
    """
    state = torch.get_rng_state()
    seed = pass_number()
    torch.set_rng_state(state)
    with drawing_from(seed_of_part(seed, part + 1 << 20)):
        before = _torch_states()
        yield lambda: any(not torch.equal(a, b) for a, b in zip(before, _torch_states(), strict=True))


def pass_number() -> int:
    """Draw a number, with which the stream of the host goes on."""
    return int(torch.randint(2**62, ()))


def seed_of_part(seed: int, part: int) -> int:
    """Return the seed for one of several parts (data ranks, microbatches, parts of a sequence) that share a seed.

    Args:
        seed: The shared seed.
        part: The number of the part.
    """
    return (seed + part * _STRIDE) % 2**63


def data_rank_stream(data_rank: int, *, progress: int, device: torch.device) -> RandomState:
    """Return the start of the stream of one data rank; the generators themselves stay as they are.

    Args:
        data_rank: The rank among those that read different samples; ranks that share samples share the stream.
        progress: The number of updates so far, so that a run that resumes does not repeat the numbers of the first.
        device: This rank's device.
    """
    with unchanged_generators(device):
        # Part 0 is the shared seed itself, from which hooks and loaders draw on all ranks.
        seed_generators(seed_of_part(torch.initial_seed() + progress, data_rank + 1))
        return RandomState.take(device)


def _is_seeded(device: torch.device) -> bool:
    """Whether devices of this kind have generators of their own beside the host's."""
    return device.type not in ("cpu", "mps", "meta")


def _used_accelerator() -> torch.device | None:
    """The accelerator on which this process draws; `None` where it has used none yet."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or not _is_seeded(accelerator):
        return None
    # Reading the state would initialize the device, which takes memory and rules out forked workers.
    if not torch.get_device_module(accelerator).is_initialized():
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _torch_states() -> list[Tensor]:
    device = _used_accelerator()
    own = [] if device is None else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def _seed_torch(seed: int) -> None:
    """Seed as `torch.manual_seed`, which also records its caller's stack for each device type not used yet: slow."""
    torch.default_generator.manual_seed(seed)
    if (device := _used_accelerator()) is not None:
        torch.get_device_module(device).manual_seed_all(seed)
