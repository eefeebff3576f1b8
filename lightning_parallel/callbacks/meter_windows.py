"""Amounts of training between two logs, over all ranks, and the rates that they give."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from lightning_parallel.callbacks.batch_geometry import num_readers
from lightning_parallel.callbacks.step_clock import Phases
from lightning_parallel.callbacks.step_flops import FlopsOfUnit
from lightning_parallel.callbacks.strategy_protocol import replica_devices
from lightning_parallel.ranks.mesh import build_host_group

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@dataclass
class Amounts:
    """Samples and tokens on which steps have trained; not a number where a batch does not show it.

    Args:
        samples: The samples.
        tokens: The tokens.
        steps: The updates.
    """

    samples: float = 0.0
    tokens: float = 0.0
    steps: int = 0

    def add(self, other: Amounts) -> None:
        """Add those of other steps."""
        self.samples += other.samples
        self.tokens += other.tokens
        self.steps += other.steps

    @property
    def numbers(self) -> tuple[float, float]:
        """Samples and tokens."""
        return self.samples, self.tokens

    @property
    def units(self) -> float:
        """Tokens, or samples where there are none."""
        return self.samples if math.isnan(self.tokens) else self.tokens


@dataclass(frozen=True)
class Window:
    """Updates between two logs, over all ranks, whose time may not be over yet.

    Args:
        phases: Their time.
        timed: What they have trained on.
        total: What all updates have trained on.
        flops: FLOPs for each token or sample.
        at: The step under which they are logged.
    """

    phases: Phases
    timed: Amounts
    total: Amounts
    flops: FlopsOfUnit
    at: int

    def values(self, num_devices: int, peak: float | None, *, waits: bool) -> dict[str, float]:
        """The values to log, by name.

        Args:
            num_devices: The number of devices.
            peak: FLOP/s that each can do, if known.
            waits: Whether to wait for the device.
        """
        found = {"samples": self.total.samples, "tokens": self.total.tokens}
        seconds = sum(self.phases.seconds(waits=waits).values())
        if self.timed.steps and seconds > 0:
            amounts = {"samples": self.timed.samples, "tokens": self.timed.tokens, "steps": self.timed.steps}
            flops = {"flops": self.flops.model, "hardware_flops": self.flops.hardware}
            amounts |= {name: each * self.timed.units for name, each in flops.items() if each is not None}
            rates = {name: amount / seconds for name, amount in amounts.items()}
            found |= {f"{name}_per_sec": rate for name, rate in rates.items()}
            found |= {f"device/{name}_per_sec": rate / num_devices for name, rate in rates.items() if name != "steps"}
            shares = {"mfu": "flops", "hfu": "hardware_flops"}
            if peak is not None:
                found |= {share: rates[name] / num_devices / peak for share, name in shares.items() if name in rates}
        return {f"throughput/{name}": value for name, value in found.items() if not math.isnan(value)}


@dataclass(frozen=True)
class MeteredRanks:
    """The ranks, as they share samples.

    Args:
        num_readers: Those that read different samples.
        num_sharing: Those that share each sample.
        num_devices: The devices of all.
        group: All of them, in host memory; ``None`` for one.
    """

    num_readers: int
    num_sharing: int
    num_devices: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, trainer: Trainer) -> MeteredRanks:
        """The ranks of `trainer`. A collective, which makes a group for host memory where there is none."""
        size, readers = trainer.world_size, num_readers(trainer)
        group = build_host_group(trainer.strategy.root_device.type) if dist.is_initialized() and size > 1 else None
        return cls(readers, max(1, size // readers), size * len(replica_devices(trainer)), group)

    def summed(self, numbers: list[float]) -> list[float]:
        """Sums over the ranks, in which samples that several ranks share count once. A collective."""
        if self.group is None:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.group)
        return (sums / self.num_sharing).tolist()

    def of_all(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every rank. A collective of hosts, which waits for no device."""
        if self.group is None:
            return [numbers]
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(found, own, group=self.group)
        return [each.tolist() for each in found]
