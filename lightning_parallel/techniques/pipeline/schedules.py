"""Pipeline schedules, their requirements, and numbers of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.divisibility import divisors, listed

TURNS = "turns"
"""No such order: stages take turns on whole batches."""
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
"""Orders of microbatches."""
LOSSES = ("auto", "batch", "microbatch")


@dataclass(frozen=True)
class PipelinePolicy:
    """Rules by which a stack is cut, and the order in which stages run; knows no module.

    Args:
        schedule: One of `SCHEDULES`, or `TURNS`.
        microbatches: Parts of a rank's batch; ``"auto"`` is the largest divisor that is at most twice the stages.
        stages: Layers of each stage; ``"auto"`` balances numbers of parameters, ``"time"`` measured times.
        virtual_stages: Stages of each rank.
        loss: Whether what comes after the stack runs once on the whole ``"batch"``, or for each ``"microbatch"``;
            ``"auto"`` takes the second where both are equal.
    """

    schedule: str = "1f1b"
    microbatches: int | Literal["auto"] = "auto"
    stages: Sequence[int] | Literal["auto", "time"] = "auto"
    virtual_stages: int = 1
    loss: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.stages, list):  # as in YAML
            object.__setattr__(self, "stages", tuple(self.stages))

    def given(self) -> list[str]:
        """Options that differ from their defaults, as ``name=value``."""
        found = {option.name: getattr(self, option.name) for option in fields(self)}
        chosen = {option.name: found[option.name] for option in fields(self) if found[option.name] != option.default}
        return [f"{name}={list(v) if isinstance(v, tuple) else v!r}" for name, v in chosen.items()]

    @property
    def is_v(self) -> bool:
        """Whether a rank has a stage from each end."""
        return self.schedule in _torch.schedules.V_SCHEDULES

    @property
    def takes_turns(self) -> bool:
        """Whether each step runs once on every rank, and each layer on the rank that has it."""
        return self.schedule == TURNS

    @property
    def stages_per_rank(self) -> int:
        """Stages of each rank; V-schedules always have two."""
        return 2 if self.is_v else self.virtual_stages

    def num_stages(self, num_ranks: int) -> int:
        """Stages of all ranks."""
        return num_ranks * self.stages_per_rank

    def least_microbatches(self, num_ranks: int) -> int:
        """The fewest microbatches of a training step with which no stage idles throughout."""
        return self.num_stages(num_ranks) if self.schedule == "dualpipev" else num_ranks

    def fits(self, count: int, num_ranks: int) -> bool:
        """Whether the schedule can run `count` microbatches.

        Args:
            count: The number of microbatches.
            num_ranks: Ranks that share the stack.
        """
        if count < self.least_microbatches(num_ranks):
            return False
        return self.schedule != "interleaved" or count % (count // num_ranks) == 0

    def training_microbatches(self, batch_size: int, num_ranks: int) -> int:
        """Count the microbatches of a training batch.

        Args:
            batch_size: The number of samples.
            num_ranks: Ranks that share the stack.

        Raises:
            ConfigurationError: If it cannot be cut as given, or into too few parts.
        """
        possible = [n for n in divisors(batch_size) if self.fits(n, num_ranks)]
        start = f"a batch of {batch_size} samples a rank"
        if self.microbatches != "auto":
            if self.microbatches not in possible:
                raise ConfigurationError(
                    [
                        f"{start} cannot be cut into microbatches={self.microbatches} with schedule={self.schedule!r} "
                        f"over {num_ranks} ranks; possible: {listed(possible) or 'none'}; or give another batch size"
                    ]
                )
            return self.microbatches
        limit = 2 * self.num_stages(num_ranks)
        if not possible or possible[0] > limit:
            least = self.least_microbatches(num_ranks)
            raise ConfigurationError(
                [
                    f"{start} has no divisor from {least} to {limit} that schedule={self.schedule!r} can run as "
                    f"microbatches over {num_ranks} ranks; give a batch size that {least} divides, microbatches=, or a "
                    "smaller pipeline"
                ]
            )
        return max(n for n in possible if n <= limit)

    def any_microbatches(self, batch_size: int, num_ranks: int) -> int:
        """Count the microbatches of a batch of any size: in evaluation, and the last one of an epoch.

        Args:
            batch_size: The number of samples.
            num_ranks: Ranks that share the stack.
        """
        limit = 2 * self.num_stages(num_ranks) if self.microbatches == "auto" else self.microbatches
        return divisors(batch_size, at_most=limit)[-1]


def pipeline_violations(policy: PipelinePolicy, num_ranks: int) -> list[str]:
    """Reasons why `policy` cannot hold over `num_ranks` ranks, for any module; empty if it can.

    Args:
        policy: The rules.
        num_ranks: Ranks that share the stack.
    """
    found = []
    name = policy.schedule
    if name not in (*SCHEDULES, TURNS):
        found.append(f"schedule={name!r} is unknown; possible: {', '.join(SCHEDULES)}, {TURNS}")
    if policy.loss not in LOSSES:
        found.append(f"loss={policy.loss!r} is unknown; possible: {', '.join(LOSSES)}")
    virtual = policy.virtual_stages
    if isinstance(virtual, bool) or not isinstance(virtual, int) or virtual < 1:
        return [*found, f"virtual_stages={virtual!r} is not a number of stages; give at least 1"]
    if name in ("gpipe", "1f1b", TURNS) and virtual != 1:
        found.append(
            f"virtual_stages={virtual} with schedule={name!r}, which has one stage a rank; give schedule='interleaved'"
        )
    if name == "interleaved" and virtual < 2:
        found.append(
            "schedule='interleaved' needs virtual_stages of at least 2 on each rank; give virtual_stages=2, or "
            "schedule='1f1b'"
        )
    if policy.is_v and virtual not in (1, 2):
        found.append(f"virtual_stages={virtual} with schedule={name!r}, which has two stages a rank; give 2")
    if name == TURNS:
        found += turn_violations(policy, f"schedule={TURNS!r}")
    return [*found, *_count_violations(policy, num_ranks), *_stage_violations(policy, num_ranks)]


def turn_violations(policy: PipelinePolicy, because: str) -> list[str]:
    """Reasons why options do not go with stages that take turns; empty without.

    Args:
        policy: The rules.
        because: Why they take turns, for messages.
    """
    given = [each for each in policy.given() if not each.startswith(("stages=[", f"schedule={TURNS!r}"))]
    if not given:
        return []
    return [
        f"{because} lets pipeline stages take turns on whole batches, to which {', '.join(given)} does not apply; "
        "leave it out"
    ]


def stack_length_violations(policy: PipelinePolicy, num_ranks: int, num_layers: int, paths: Sequence[str]) -> list[str]:
    """Reasons why `num_layers` layers cannot be cut as `policy` says; empty if they can.

    Args:
        policy: The rules.
        num_ranks: Ranks that share them.
        num_layers: The number of layers of all stacks together.
        paths: The paths of the stacks, for messages.
    """
    have = f"{' and '.join(paths)} {'has' if len(paths) == 1 else 'have together'}"
    stages = policy.num_stages(num_ranks)
    if not isinstance(policy.stages, str) and sum(policy.stages) != num_layers:
        return [
            f"stages={list(policy.stages)} are {sum(policy.stages)} layers, but {have} {num_layers}; give {stages} "
            f"numbers with sum {num_layers}, or 'auto'"
        ]
    if num_layers < stages:
        return [
            f"{have} {num_layers} layers, fewer than the {stages} stages of pipeline={num_ranks} with "
            f"{policy.stages_per_rank} on each rank; give pipeline={num_layers // policy.stages_per_rank or 1} or less"
        ]
    return []


def _count_violations(policy: PipelinePolicy, num_ranks: int) -> list[str]:
    count = policy.microbatches
    if count == "auto":
        return []
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        return [f"microbatches={count!r} is not a number of parts of a batch; give at least 1, or 'auto'"]
    least = policy.least_microbatches(num_ranks)
    if count < least:
        return [
            f"microbatches={count} are fewer than {least}, which schedule={policy.schedule!r} needs over {num_ranks} "
            f"ranks for none to idle throughout; give {least} or more, or 'auto'"
        ]
    if not policy.fits(count, num_ranks):
        legal = [n for n in range(least, 2 * count + 1) if policy.fits(n, num_ranks)]
        return [
            f"microbatches={count} with schedule='interleaved' over {num_ranks} ranks go in unequal rounds; possible: "
            f"{', '.join(map(str, legal))}"
        ]
    return []


def _stage_violations(policy: PipelinePolicy, num_ranks: int) -> list[str]:
    given, stages = policy.stages, policy.num_stages(num_ranks)
    if given in ("auto", "time"):
        return []
    numbers = [] if isinstance(given, str) else list(given)
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in numbers):
        return [f"stages={given!r} are not numbers of layers of at least 1; give {stages} of them, 'auto' or 'time'"]
    if len(numbers) != stages:
        return [f"stages={numbers} are {len(numbers)} stages, but there are {stages}; give {stages} numbers, or 'auto'"]
    return []
