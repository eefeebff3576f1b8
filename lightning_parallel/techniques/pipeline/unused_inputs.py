"""Inputs of a stage that get no gradient, as behind ``x.detach()``: none for the stages before, and not zeros."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan


class UnusedInputs:
    """Tells the stage before, once a step, which of the tensors it has passed on get no gradient.

    Gradients are sent for all of them, so that each transfer of a schedule has its partner. But zeros are a gradient:
    weight decay and momentum move parameters that have one, and leave those without alone.

    Args:
        plan: The stages and their ranks.
        host_group: The ranks of the pipeline, for host memory.
        waiting: Makes a context for each wait for another rank.

    Example:
        >>> unused = UnusedInputs(plan, host_group, waiting)
        >>> unused.tell(1, [True])  # on the rank of stage 1, behind its backward
        >>> unused.behind(0, 1)  # on the rank of stage 0, before its backward
        [True]
    """

    def __init__(
        self, plan: StagePlan, host_group: ProcessGroup, waiting: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._plan, self._host_group, self._waiting = plan, host_group, waiting
        self._by_stage: dict[int, list[bool]] = {}
        self._sent: list[tuple[Tensor, dist.Work]] = []

    def tell(self, stage: int, unused: list[bool]) -> None:
        """Note which inputs of `stage` have got no gradient, and send it with those of the first microbatch.

        Args:
            stage: The stage that has received them.
            unused: One for each that wants a gradient.

        Raises:
            ConfigurationError: If one has a gradient in a later microbatch, when the stage before has gone on without.
        """
        if (known := self._by_stage.get(stage)) is not None:
            if any(before and not now for before, now in zip(known, unused, strict=True)):
                raise ConfigurationError([_PARTED.format(stage)])
            return
        self._by_stage[stage] = unused
        target = self._plan.rank_of(stage - 1)
        if target != self._host_group.rank():
            flags = torch.tensor(unused, dtype=torch.uint8)
            # By a tag of its own: announcements of shapes go the same way, where a rank has several stages.
            work = dist.isend(flags, group=self._host_group, group_dst=target, tag=stage)
            assert work is not None
            self._sent.append((flags, work))

    def behind(self, stage: int, count: int) -> list[bool]:
        """Return which of the `count` tensors get no gradient that `stage` has passed on and that want one."""
        if stage + 1 not in self._by_stage:
            flags = torch.zeros(count, dtype=torch.uint8)
            with self._waiting():
                dist.recv(flags, group=self._host_group, group_src=self._plan.rank_of(stage + 1), tag=stage + 1)
            self._by_stage[stage + 1] = [bool(flag) for flag in flags.tolist()]
        return self._by_stage[stage + 1]

    def end(self) -> None:
        """Wait until all is sent. Call it when a step has ended."""
        with self._waiting():
            for _, work in self._sent:
                work.wait()
        self._sent = []


_PARTED = (
    "what pipeline stage {} receives gets no gradient in a step's first microbatch, as behind `x.detach()`, and one in "
    "a later microbatch, when the stages before have gone on without. Decide it for the whole batch, or give "
    "schedule='turns' or pipeline=1"
)
