"""What layers take: measured in steps without backward, by which stages are balanced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_parallel.techniques.pipeline.stage_plan import StagePlan, StepCosts

ROUNDS = 4
"""How often a step is timed; the shortest time counts, so the first may be slow."""
_WORTH = 0.95
"""Stages are moved if the slowest one takes at most this part of what it took; less is noise."""


class StepClock:
    """Times the layers of a step on this rank, and what is before the first and behind the last one.

    Args:
        plan: Which layers are where.
        device: Where they run.
    """

    def __init__(self, plan: StagePlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._layers: list[list[float]] = [[] for _ in range(plan.num_layers)]
        self._around: list[list[float]] = [[] for _ in range(plan.num_stages)]
        self._inside = 0.0

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Times what runs in here, but for layers, as what is around the stack."""
        self._inside, begin = 0.0, self._now()
        yield
        self._around[stage].append(self._now() - begin - self._inside)

    @contextmanager
    def of_layer(self, index: int) -> Iterator[None]:
        """Times what runs in here as layer `index`."""
        begin = self._now()
        yield
        self._layers[index].append(self._now() - begin)
        self._inside += self._layers[index][-1]

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def costs(self, group: ProcessGroup) -> StepCosts:
        """In microseconds, equal on all ranks. A collective.

        Args:
            group: All ranks, for host memory; each layer is on as many of them.
        """
        measured = [*self._layers, self._around[0], self._around[self._plan.last]]
        found = torch.tensor([min(times, default=0.0) for times in measured], dtype=torch.float64)
        dist.all_reduce(found, group=group)
        share = self._plan.num_ranks / group.size()
        *layers, first, last = (max(1, round(1e6 * share * seconds)) for seconds in found.tolist())
        return StepCosts(tuple(layers), first, last)


def is_worth_moving(costs: StepCosts, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether stages of `after` layers are faster than those of `before` by more than times vary."""
    return costs.largest(after) <= _WORTH * costs.largest(before)
