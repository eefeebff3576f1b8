"""How a stack of layers is cut into pipeline stages, and which ranks hold what. Layer 1.

A stage is a run of neighbouring layers; the first one has what comes before the stack, too, and the last one what comes
after. A rank has one stage, or several (virtual stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

_HOLDING = "_lightning_parallel_holding"
_HOLDINGS = "_lightning_parallel_holdings"
BEFORE_THE_STACK = -1
"""The position in a step before the first layer; from there on, a position is the number of the layer begun last."""


@dataclass(frozen=True)
class StagePlan:
    """Which layers are which stage, and which rank has it.

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
    """What stages are balanced by: numbers of parameters, or microseconds.

    Args:
        layers: Of each layer.
        first: Of what the first stage has besides its layers.
        last: The same of the last stage.
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
    """Numbers of layers for each stage, such that the largest stage is as small as it can be.

    Args:
        costs: Of each layer, and of what is around them.
        num_stages: How many stages; not more than layers.
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


@dataclass(frozen=True, eq=False)
class Holding:
    """The ranks of a pipeline that hold a parameter or buffer.

    Args:
        ranks: Places on the pipeline axis; the first is the owner, whose value counts.
        group: The ranks of the pipeline.
        host_group: The same, for host memory.
    """

    ranks: tuple[int, ...]
    group: ProcessGroup
    host_group: ProcessGroup

    @property
    def is_here(self) -> bool:
        """Whether this rank holds it."""
        return self.group.rank() in self.ranks

    @property
    def counts_here(self) -> bool:
        """Whether it is this rank that counts it, where each is to count once."""
        return self.group.rank() == self.ranks[0]

    def from_owner(self, value: Tensor) -> Tensor:
        """The owner's `value`, a tensor in host memory, on all ranks of the pipeline. A collective.

        Args:
            value: Where this rank is not the owner, anything of the same shape and dtype.
        """
        received = value.contiguous() if self.counts_here else torch.empty(value.shape, dtype=value.dtype)
        dist.broadcast(received, group=self.host_group, group_src=self.ranks[0])
        return received

    def object_from_owner(self, value: Any) -> Any:
        """The owner's `value` on all ranks of the pipeline. A collective."""
        return broadcast_object(value, self.ranks[0], self.host_group)


def broadcast_object(value: Any, source: int, group: ProcessGroup) -> Any:
    """The value that rank `source` of `group` gives, on all of its ranks. A collective."""
    box = [value if group.rank() == source else None]
    dist.broadcast_object_list(box, group=group, group_src=source)
    return box[0]


def mark(module: nn.Module, holdings: Mapping[str, Holding]) -> None:
    """Note on the parameters of `module`, and on itself, which ranks hold what: by name, buffers included."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        setattr(parameter, _HOLDING, holdings[name])
    module.__dict__[_HOLDINGS] = dict(holdings)


def unmark(module: nn.Module) -> None:
    """Take the notes off the parameters of a `module` that every rank has whole again."""
    for parameter in module.parameters():
        vars(parameter).pop(_HOLDING, None)


def holding_of(parameter: Tensor) -> Holding | None:
    """Which ranks of a pipeline hold `parameter`; ``None`` without a pipeline."""
    return getattr(parameter, _HOLDING, None)


def holdings_of(module: nn.Module) -> Mapping[str, Holding]:
    """Name of a parameter or buffer -> which ranks of a pipeline hold it; empty without a pipeline."""
    found: Mapping[str, Holding] = module.__dict__.get(_HOLDINGS, {})
    return found
