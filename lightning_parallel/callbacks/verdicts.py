"""Verdicts on what holds a training up: the evidence, what it costs, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_parallel.callbacks.breakdown_windows import Straggler

VISIBLE = 0.1
"""The part of an update that has to be lost before anything is said."""
_MOSTLY = 0.3
"""The part that a small model loses to communication."""
_SMALL = 32 * 2**20
"""Bytes of gradients below which communication takes its time for each call, and not for what it sends."""


@dataclass(frozen=True)
class Verdict:
    """One thing that holds a training up.

    Args:
        name: ``"memory"``, ``"slow rank"``, ``"throttled"``, ``"data"``, ``"copies"``, ``"communication"`` or
            ``"too small"``.
        seconds: Of an update that would be saved.
        step: Seconds of an update.
        evidence: What was measured.
        advice: What to do.
    """

    name: str
    seconds: float
    step: float
    evidence: str
    advice: str

    def __str__(self) -> str:
        rest = self.step - self.seconds
        gain = f" Without it an update takes {_ms(rest)} ms in place of {_ms(self.step)} ms." if self.seconds else ""
        return f"{self.evidence}.{gain} {self.advice}"


@dataclass(frozen=True)
class Throttling:
    """A device that its driver slows down, for heat or power.

    Args:
        rank: The rank that has it.
        share: Of the time in which it is throttled.
        clock: Its clock as a share of the highest one; not a number where it is not known.
    """

    rank: int
    share: float
    clock: float


def most_throttled(values: Mapping[str, float], num_ranks: int) -> Throttling | None:
    """The device that is throttled for longest, as a `GpuMonitor` has logged it; ``None`` where none is.

    Args:
        values: By name, of all ranks.
        num_ranks: The ranks.
    """

    def of(rank: int, name: str) -> float:
        return values.get(f"monitor/rank{rank}/{name}", math.nan)

    found = [Throttling(rank, of(rank, "throttled"), of(rank, "clock_percent") / 100) for rank in range(num_ranks)]
    return max((each for each in found if each.share > 0), key=lambda each: each.share, default=None)


@dataclass(frozen=True)
class Evidence:
    """Measurements of a window.

    Args:
        seconds: Phase -> seconds of an update, in the mean over ranks.
        straggler: The rank for which others wait.
        num_ranks: The ranks.
        exposed: Of each rank, the seconds of communication that nothing hides; empty where nobody has measured them.
        gradient_bytes: Of the whole model.
        retries: How often the allocator had to free memory and try again, in this window.
        copies_aside: Whether batches are copied from pinned memory already.
        throttling: The device that is throttled for longest, where a `GpuMonitor` looks.
    """

    seconds: dict[str, float]
    straggler: Straggler | None = None
    num_ranks: int = 1
    exposed: Sequence[float] = ()
    gradient_bytes: float = 0.0
    retries: float = 0.0
    copies_aside: bool = False
    throttling: Throttling | None = None

    @property
    def step(self) -> float:
        """Seconds of an update."""
        return sum(self.seconds.values())


def verdict(found: Evidence, *, on_communication: str) -> Verdict | None:
    """The verdict on what costs most, if anything is worth a look.

    Args:
        found: The evidence.
        on_communication: What to do against communication, under this strategy.
    """
    if found.retries:
        return Verdict("memory", 0.0, found.step, _RETRIES.format(found.retries), _ON_MEMORY)
    candidates = [
        *_of_throttling(found),
        *_of_ranks(found),
        *_of_reading(found),
        *_of_communication(found, on_communication),
    ]
    return max(candidates, key=lambda each: each.seconds, default=None)


def _of_ranks(found: Evidence) -> list[Verdict]:
    if (slow := found.straggler) is None or slow.seconds - slow.median < VISIBLE * found.step:
        return []
    advice = _ON_SLOW_DATA if slow.phase == "data" else _ON_SLOW_RANK
    return [Verdict("slow rank", slow.seconds - slow.median, found.step, str(slow), advice.format(slow.rank))]


def _of_throttling(found: Evidence) -> list[Verdict]:
    if (hot := found.throttling) is None or hot.share < VISIBLE or 1 - hot.clock < VISIBLE:
        return []
    is_known = not math.isnan(hot.clock)
    evidence = f"the device of rank {hot.rank} is throttled in {hot.share:.0%} of the time"
    evidence += f", and runs at {hot.clock:.0%} of its clock" if is_known else ""
    lost = (1 - hot.clock) * found.step if is_known else 0.0
    return [Verdict("throttled", lost, found.step, evidence, _ON_THROTTLING)]


def _of_reading(found: Evidence) -> list[Verdict]:
    data, copies = found.seconds.get("data", 0.0), found.seconds.get("copy", 0.0)
    verdicts = []
    if data >= VISIBLE * found.step:
        evidence = f"waiting for data takes {data / found.step:.0%} of an update"
        verdicts.append(Verdict("data", data, found.step, evidence, _ON_DATA))
    if copies >= VISIBLE * found.step:
        evidence = (
            f"copying batches to the device, with the hooks around it, takes {copies / found.step:.0%} of an update"
        )
        advice = _ON_PINNED_COPIES if found.copies_aside else _ON_COPIES
        verdicts.append(Verdict("copies", copies, found.step, evidence, advice))
    return verdicts


def _of_communication(found: Evidence, advice: str) -> list[Verdict]:
    # A rank that waits for a slow one is within a collective, too; the one that waits least shows what it costs.
    exposed = min(found.exposed, default=0.0)
    if exposed < VISIBLE * found.step or found.num_ranks == 1:
        return []
    exposed = min(exposed, found.step)
    share = exposed / found.step
    name, evidence = "communication", f"communication that nothing hides takes {share:.0%} of an update"
    is_small = found.gradient_bytes <= _SMALL
    advice = _ON_SMALL if is_small else advice
    if is_small and share >= _MOSTLY:
        ranks, mib = found.num_ranks, found.gradient_bytes / 2**20
        name = "too small"
        evidence = (
            f"the model is too small for {ranks} ranks: gradients are {mib:.2g} MiB, and communication takes "
            f"{share:.0%} of an update, so that {ranks} ranks do the work of {ranks * (1 - share):.2g}"
        )
    return [Verdict(name, exposed, found.step, evidence, advice)]


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


_RETRIES = "the device had no memory left, and its allocator freed some and tried again, {:.0f} times"
_ON_MEMORY = (
    "Take recompute='selective' or 'full', a smaller batch with accumulate_grad_batches, fsdp_custom in place of "
    "ddp_custom, or fsdp_offload_custom"
)
_ON_SLOW_DATA = (
    "Look at what rank {} reads: longer samples, a slower disk, fewer cores for its workers; more workers or "
    "DevicePrefetch may hide it"
)
_ON_SLOW_RANK = "Look at the machine of rank {}: other processes, heat, fewer cores; or at what this rank alone does"
_ON_THROTTLING = "Look at its cooling and its supply of power; nvidia-smi -q -d PERFORMANCE says which of them it is"
_ON_DATA = "Give the loader more workers (num_workers=), pin_memory=True on an accelerator, and take DevicePrefetch"
_ON_COPIES = "Give the loader pin_memory=True and take DevicePrefetch, which copies while a step computes"
_ON_PINNED_COPIES = "Let hooks around the copy do less, or send smaller dtypes, such as images in uint8"
_ON_SMALL = "Use fewer ranks, or a larger batch on each, for which communication takes hardly longer"
