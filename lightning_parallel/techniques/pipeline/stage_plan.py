"""Division of a stack of layers into pipeline stages.

A stage is a run of neighbouring layers; the first stage also has the prologue, and the last one the epilogue. A rank
has one stage, or several (virtual stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

BEFORE_THE_STACK = -1
"""The position in a step before the first layer; from there on, a position is the number of the layer begun last."""


@dataclass(frozen=True)
class StagePlan:
    """Layers of each stage, and the rank of each stage.

    Args:
        num_ranks: Ranks that share the stack.
        ends: For each stage, the number of the layer after its last one.
        is_v: Whether a rank has the stages ``rank`` and ``last - rank``, in place of ``rank``, ``rank + num_ranks``...
    """

    num_ranks: int
    ends: tuple[int, ...]
    is_v: bool = False

    @property
    def num_stages(self) -> int:
        """Stages on all ranks together."""
        return len(self.ends)

    @property
    def num_layers(self) -> int:
        """Layers of all stages together."""
        return self.ends[-1]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(len(self.layers_of(stage)) for stage in range(self.num_stages))

    @property
    def last(self) -> int:
        """The number of the last stage."""
        return self.num_stages - 1

    def layers_of(self, stage: int) -> range:
        """The numbers of the layers of a stage."""
        return range(self.ends[stage - 1] if stage else 0, self.ends[stage])

    def stage_at(self, position: int) -> int:
        """The stage that computes what comes after the beginning of layer `position`."""
        return next(stage for stage, end in enumerate(self.ends) if position < end)

    def rank_of(self, stage: int) -> int:
        """The rank on the pipeline axis that has a stage."""
        if self.is_v and stage >= self.num_ranks:
            return self.last - stage
        return stage % self.num_ranks

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    def ranks_at(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The ranks that compute at any of `positions`, without repetition, in order of stages."""
        return tuple(dict.fromkeys(self.rank_of(stage) for stage in sorted({self.stage_at(p) for p in positions})))


@dataclass(frozen=True)
class StepCosts:
    """Costs by which stages are balanced: numbers of parameters, or microseconds.

    Args:
        layers: The cost of each layer.
        first: The cost of the prologue, which is on the first stage.
        last: The cost of the epilogue, which is on the last stage.
    """

    layers: tuple[int, ...]
    first: int
    last: int

    def largest(self, counts: Sequence[int]) -> int:
        """The cost of the largest of stages that have so many layers."""
        sums = [0, *accumulate(self.layers)]
        ends = [0, *accumulate(counts)]
        stages = [sums[end] - sums[begin] for begin, end in pairwise(ends)]
        stages[0] += self.first
        stages[-1] += self.last
        return max(stages)


def balanced(costs: StepCosts, num_stages: int) -> tuple[int, ...]:
    """Balance stages so that the most expensive one costs as little as possible.

    Args:
        costs: Of the layers, prologue and epilogue.
        num_stages: The number of stages; not more than there are layers.

    Returns:
        The number of layers of each stage.
    """
    sums = [0, *accumulate(costs.layers)]
    count = len(costs.layers)

    def size(begin: int, end: int, stage: int) -> int:
        around = (costs.first if stage == 0 else 0) + (costs.last if stage == num_stages - 1 else 0)
        return sums[end] - sums[begin] + around

    # best[end] = the smallest possible largest stage, when the stages so far have the layers before `end`, and the cut
    # of its last stage. Among equals the later cut: early stages have more microbatches in flight.
    best: dict[int, tuple[int, tuple[int, ...]]] = {end: (size(0, end, 0), (end,)) for end in range(1, count + 1)}
    for stage in range(1, num_stages):
        best = {
            end: min(
                (max(best[cut][0], size(cut, end, stage)), (*best[cut][1], end - cut))
                for cut in range(stage, end)
                if cut in best
            )
            for end in range(stage + 1, count + 1)
        }
    return best[count][1]
