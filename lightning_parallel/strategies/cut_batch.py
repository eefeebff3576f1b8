"""A batch that a pipeline cuts into microbatches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_parallel.techniques.pipeline.joined import IN_ORDER, JoinedOutputs, Passed, RowOrder


@dataclass(frozen=True)
class CutBatch:
    """A batch that is cut into microbatches.

    Args:
        whole: All of it.
        parts: The microbatches.
        args: Further arguments of the step.
        part_size: The samples of a microbatch.
        seed: The seed of its random numbers.
        joins: Whether what comes after the stack runs once, on the whole batch.
        order: The order of the rows that the stack is given for its samples.
    """

    whole: Any
    parts: list[Any]
    args: tuple[Any, ...]
    part_size: int
    seed: int = 0
    joins: bool = False
    order: RowOrder = IN_ORDER

    def joined(self, passed: list[Passed], num_beside: int, seen: dict[int, Any]) -> JoinedOutputs:
        """Join what the last stage has computed for each microbatch.

        Args:
            passed: What it has computed.
            num_beside: The number of side inputs in it, and of what was kept.
            seen: Keeps how many rows of each sample there were.
        """
        return JoinedOutputs(passed, num_beside, order=self.order, part_size=self.part_size, seen=seen)
