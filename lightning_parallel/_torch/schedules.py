"""Action orders of pipeline schedules: private or version-dependent names of torch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any


def schedule_actions(name: str, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> list[list[str]]:
    """List the actions of each rank in a step, in order, in torch's notation, such as ``"0F1"``.

    An action is a stage's number, a kind (F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B) and a microbatch's number. The
    orders are those of `torch.distributed.pipelining.schedules`, whose own executor is not used because it wants each
    microbatch of each step to have the shapes of the first. `_get_pipeline_order`, `_calculate_single_rank_operations`
    and `_add_send_recv`, since 2.5.

    Args:
        name: ``"gpipe"``, ``"1f1b"``, ``"interleaved"``, ``"zbv"`` or ``"dualpipev"``.
        num_ranks: Ranks of the pipeline.
        stages_per_rank: Stages of each rank.
        num_microbatches: Microbatches of a step.

    Returns:
        For each rank, its actions.
    """
    from torch.distributed.pipelining import schedules

    num_stages = num_ranks * stages_per_rank
    rounds = max(1, num_microbatches // num_ranks)
    # Stands for `self` of a schedule: the orders depend on these numbers only, and a real schedule needs stages.
    state = SimpleNamespace(
        _num_stages=num_stages,
        _n_microbatches=num_microbatches,
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        num_stages=num_stages,
        number_of_rounds=rounds,
        microbatches_per_round=num_microbatches // rounds,
    )
    cls: Any = {
        "gpipe": schedules.ScheduleGPipe,
        "1f1b": schedules.Schedule1F1B,
        "interleaved": schedules.ScheduleInterleaved1F1B,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }[name]
    if stages_per_rank == 1:
        order = cls._get_pipeline_order(state)
    else:
        order = {rank: cls._calculate_single_rank_operations(state, rank) for rank in range(num_ranks)}
    flat = [[str(each) for action in order[rank] for each in _computed(action)] for rank in range(num_ranks)]
    if name == "1f1b":  # torch 2.13 numbers the forwards of the last rank from 1 on
        flat = [_numbered_forwards(actions) for actions in flat]
    return with_transfers(flat, is_v=name in V_SCHEDULES)


V_SCHEDULES = ("zbv", "dualpipev")
"""Schedules in which a rank has the stages ``rank`` and ``last - rank``."""


def with_transfers(computed: list[list[str]], *, is_v: bool) -> list[list[str]]:
    """Add the sends and receives between computations, ordered so that no ranks wait for each other in a circle.

    `torch.distributed.pipelining.schedules._add_send_recv`, since 2.5; no public spelling.

    Args:
        computed: For each rank, its computations in order.
        is_v: Whether a rank has the stages ``rank`` and ``last - rank``.

    Returns:
        For each rank, its actions.
    """
    from torch.distributed.pipelining import schedules

    num_ranks = len(computed)
    actions = {rank: [schedules._Action.from_str(text) for text in texts] for rank, texts in enumerate(computed)}
    num_stages = 1 + max(action.stage_index for each in actions.values() for action in each)

    def rank_of(stage: int) -> int:
        return num_stages - 1 - stage if is_v and stage >= num_ranks else stage % num_ranks

    added = schedules._add_send_recv(actions, rank_of, num_stages)
    return [[str(action) for action in added[rank]] for rank in range(num_ranks)]


def _numbered_forwards(actions: list[str]) -> list[str]:
    forwards = itertools.count()
    return [f"{action.partition('F')[0]}F{next(forwards)}" if "F" in action else action for action in actions]


def _computed(action: Any) -> list[Any]:
    """Split an action of torch's schedules into single computations; bubbles and reductions have none."""
    if action is None:
        return []
    if action.sub_actions is not None:
        return list(action.sub_actions)
    return [action] if action.computation_type.value in ("F", "B", "I", "W") else []
