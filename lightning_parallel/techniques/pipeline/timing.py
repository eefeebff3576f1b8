"""Times of layers, measured in steps without backward, by which stages are balanced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_parallel.techniques.pipeline.stage_plan import StagePlan, StepCosts

ROUNDS = 4
"""Number of times that a step is timed; the shortest time counts, so the first may be slow."""
_WORTH = 0.95
"""Stages are moved if the slowest then takes at most this part of its time before; a smaller gain may be noise."""


class StepClock:
    """Clock for the layers of a step on this rank, and for prologue and epilogue.

    Args:
        plan: The layers of each stage, and its rank.
        device: The device on which they run.
    """

    def __init__(self, plan: StagePlan, device: torch.device) -> None:
        self._plan = plan
        self._device = device
        self._layers: list[list[float]] = [[] for _ in range(plan.num_layers)]
        self._around: list[list[float]] = [[] for _ in range(plan.num_stages)]
        self._inside = 0.0

    @contextmanager
    def of_stage(self, stage: int) -> Iterator[None]:
        """Inside this context, time a stage without its layers, which is the prologue or epilogue."""
        self._inside, begin = 0.0, self._now()
        yield
        self._around[stage].append(self._now() - begin - self._inside)

    @contextmanager
    def of_layer(self, index: int) -> Iterator[None]:
        """Inside this context, time layer `index`."""
        begin = self._now()
        yield
        self._layers[index].append(self._now() - begin)
        self._inside += self._layers[index][-1]

    def _now(self) -> float:
        # Kernels of an accelerator run asynchronously: wait for them, else only their launch is timed.
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()

    def costs(self, group: ProcessGroup) -> StepCosts:
        """Return the costs in microseconds, equal on all ranks. A collective.

        Args:
            group: All ranks, for host memory; each layer is on the same number of them.
        """
        measured = [*self._layers, self._around[0], self._around[self._plan.last]]
        found = torch.tensor([min(times, default=0.0) for times in measured], dtype=torch.float64)
        dist.all_reduce(found, group=group)
        share = self._plan.num_ranks / group.size()
        *layers, first, last = (max(1, round(1e6 * share * seconds)) for seconds in found.tolist())
        return StepCosts(tuple(layers), first, last)


def is_worth_moving(costs: StepCosts, before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether a new cut is faster by more than times vary.

    Args:
        costs: Of the layers, prologue and epilogue.
        before: The number of layers of each stage now.
        after: The number of layers of each stage in the new cut.
    """
    return costs.largest(after) <= _WORTH * costs.largest(before)
