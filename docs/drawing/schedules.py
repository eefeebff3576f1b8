"""Schedules of a pipeline over time, from the orders that the package runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from drawing.svg import MARGIN, Drawing
from lightning_parallel.techniques.pipeline.execution import Action, training_actions
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan

STAGES_PER_RANK = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2, "dualpipev": 2}
UNITS = {"F": 1, "B": 2, "I": 2}
"""What is computed -> how long it takes here; `I` is where a V-schedule puts a backward, that of weights included."""
SIZES = ((2, 4), (4, 8))
"""Ranks of a pipeline, and microbatches of a step, of the two parts of a picture."""
ROW, LEFT = 22.0, 64.0
CELLS = {1: (17.0, "small"), 2: (13.0, "tiny")}
"""Stages of a rank -> the width of a unit of time, and the kind of text in it."""
COLORS = {("F", 0): "blue", ("F", 1): "teal", ("B", 0): "orange", ("B", 1): "yellow"}
"""Forward or backward, and the how manieth stage of the rank -> color."""


@dataclass(frozen=True)
class Timed:
    """An action of a rank and when it runs, in times of a forward.

    Args:
        rank: The rank on the pipeline axis.
        action: Stage, kind and microbatch.
        start: When it begins.
        end: When it is done.
    """

    rank: int
    action: Action
    start: int
    end: int

    @property
    def is_forward(self) -> bool:
        """Whether it is no backward."""
        return self.action.kind == "F"


def stages(schedule: str, ranks: int) -> tuple[PipelinePolicy, StagePlan]:
    """A policy, and stages of one layer each."""
    virtual = STAGES_PER_RANK[schedule]
    policy = PipelinePolicy(schedule=schedule, virtual_stages=virtual)
    return policy, StagePlan(ranks, tuple(range(1, ranks * virtual + 1)), policy.is_v)


def timeline(schedule: str, ranks: int, microbatches: int, *, joins: bool = False) -> list[Timed]:
    """Each computation of a step, at the earliest time that the order and what it waits for allow.

    Sending takes no time here, and a backward takes twice as long as a forward of the same stage.

    Args:
        schedule: Its name.
        ranks: Ranks of the pipeline.
        microbatches: Microbatches of the step.
        joins: Whether the loss runs once, on the whole batch.
    """
    policy, plan = stages(schedule, ranks)
    orders = [
        [a for a in training_actions(policy, plan, microbatches, rank, joins=joins) if a.kind in UNITS]
        for rank in range(ranks)
    ]
    ends: dict[tuple[bool, int, int], int] = {}
    last_forwards = {(True, plan.last, m) for m in range(microbatches)}
    clocks, found = [0] * ranks, []
    while any(orders):
        before = len(found)
        for rank, order in enumerate(orders):
            while order:
                action = order[0]
                needed = set(_needed(action, plan))
                if joins and action.kind != "F" and action.stage == plan.last:
                    needed |= last_forwards  # the loss of the whole batch comes first
                if not needed <= set(ends):
                    break
                start = max([clocks[rank], *(ends[each] for each in needed)])
                clocks[rank] = start + UNITS[action.kind]
                ends[action.kind == "F", action.stage, action.microbatch] = clocks[rank]
                found.append(Timed(rank, action, start, clocks[rank]))
                order.pop(0)
        assert len(found) > before, "the ranks wait for each other in a circle"
    return found


def _needed(action: Action, plan: StagePlan) -> Iterator[tuple[bool, int, int]]:
    """What has to be done before an action: the neighbouring stage, and for a backward its own forward."""
    is_forward = action.kind == "F"
    neighbour = action.stage - 1 if is_forward else action.stage + 1
    if 0 <= neighbour <= plan.last:
        yield is_forward, neighbour, action.microbatch
    if not is_forward:
        yield True, action.stage, action.microbatch


def idle_share(found: list[Timed], ranks: int) -> float:
    """The share of a step in which ranks wait."""
    return 1 - sum(each.end - each.start for each in found) / (ranks * max(each.end for each in found))


def most_in_flight(found: list[Timed], ranks: int) -> list[int]:
    """For each rank, the most activations of a stage and a microbatch that wait for their backward at once."""
    return [max(count for _, count in in_flight(found, rank)) for rank in range(ranks)]


def in_flight(found: list[Timed], rank: int) -> list[tuple[int, int]]:
    """Times at which the number of activations on a rank changes, and the number from then on.

    An activation is kept from the beginning of its forward to the end of its backward.
    """
    events = sorted((each.start, 1, 1) if each.is_forward else (each.end, 0, -1) for each in found if each.rank == rank)
    count, steps = 0, [(0, 0)]
    for time, _, change in events:
        count += change
        steps.append((time, count))
    return steps


def draw_timeline(schedule: str, *, joins: bool = False) -> Drawing:
    """A schedule with two ranks, and with four."""
    what = f"{schedule}, loss=batch" if joins else schedule
    drawing = Drawing(
        f"A training step under schedule={what}, over time",
        "The order is that of lightning_parallel.techniques.pipeline.execution.training_actions; "
        "a backward takes two units of time, sending none.",
    )
    y = MARGIN + 14
    drawing.text(MARGIN, y, f"schedule={what}", "title")
    for ranks, microbatches in SIZES:
        y = _panel(drawing, y + 26, schedule, ranks, microbatches, joins=joins)
    entries = {"blue": "forward", "orange": "backward"}
    if STAGES_PER_RANK[schedule] == 2:
        entries = {"blue": "forward, first stage of the rank", "teal": "second stage"}
        drawing.key(LEFT, y + 24, entries)
        entries, y = {"orange": "backward, first stage of the rank", "yellow": "second stage"}, y + 20
    drawing.key(LEFT, y + 24, entries)
    return drawing


def _panel(drawing: Drawing, y: float, schedule: str, ranks: int, microbatches: int, *, joins: bool) -> float:
    found = timeline(schedule, ranks, microbatches, joins=joins)
    _, plan = stages(schedule, ranks)
    cell, kind = CELLS[STAGES_PER_RANK[schedule]]
    end = max(each.end for each in found)
    most = ", ".join(map(str, most_in_flight(found, ranks)))
    head = (
        f"{ranks} ranks, {microbatches} microbatches: {idle_share(found, ranks):.0%} idle; at most {most} activations"
    )
    drawing.text(MARGIN, y, head, "label")
    y += 10
    for rank in range(ranks):
        drawing.text(MARGIN, y + ROW * rank + 15, f"rank {rank}", "small muted")
        drawing.box(LEFT, y + ROW * rank, cell * end, ROW, "gray")
    for each in found:
        chunk = plan.stages_of(each.rank).index(each.action.stage)
        color = COLORS["F" if each.is_forward else "B", chunk]
        x, top = LEFT + cell * each.start, y + ROW * each.rank
        number = str(each.action.microbatch + 1)
        drawing.named_box(x, top, cell * (each.end - each.start), ROW, number, color, kind)
    return y + ROW * ranks


def draw_in_flight() -> Drawing:
    """How many activations a rank keeps over a step, for three ways to run it."""
    drawing = Drawing(
        "Activations that wait for their backward, on each rank of four, over a step of eight microbatches",
        "Counted in the same orders as the timelines.",
    )
    ranks, microbatches = SIZES[1]
    drawing.text(MARGIN, MARGIN + 14, "Microbatches whose activations a rank keeps", "title")
    left, y, unit, height = 64.0, 62.0, 9.0, 8.0
    for schedule, joins in (("gpipe", False), ("1f1b", False), ("1f1b", True)):
        found = timeline(schedule, ranks, microbatches, joins=joins)
        end = max(each.end for each in found)
        drawing.text(MARGIN, y, f"schedule={schedule}" + (", loss=batch" if joins else ""), "label")
        y += 10
        for rank in range(ranks):
            top, bottom = y, y + height * microbatches
            drawing.box(left, top, unit * end, bottom - top, "gray")
            drawing.text(MARGIN, bottom - 4, f"rank {rank}", "small muted")
            steps = [*in_flight(found, rank), (end, 0)]
            for (time, count), (until, _) in itertools.pairwise(steps):
                if count and until > time:
                    drawing.box(
                        left + unit * time, bottom - height * count, unit * (until - time), height * count, "purple"
                    )
            most = max(count for _, count in steps)
            drawing.text(left + unit * end + 8, bottom - height * microbatches / 2 + 4, f"at most {most}", "small")
            y = bottom + 6
        y += 24
    return drawing


def draw_idle() -> Drawing:
    """The idle share of each schedule over the number of microbatches."""
    drawing = Drawing(
        "The share of a step in which four ranks of a pipeline wait, over the number of microbatches",
        "Counted in the orders that the package runs; a backward takes two units of time, sending none.",
    )
    drawing.text(MARGIN, MARGIN + 14, "Share of a step in which ranks wait (pipeline=4)", "title")
    ranks, counts = 4, (4, 8, 16, 32, 64)
    left, top, width, height = 64.0, 52.0, 420.0, 240.0
    for tenth in range(6):
        y = top + height * (1 - tenth / 5)
        drawing.line((left, y), (left + width, y), kind="thin")
        drawing.text(left - 8, y + 4, f"{tenth / 10:.0%}", "small muted", anchor="end")
    for index, count in enumerate(counts):
        x = left + width * index / (len(counts) - 1)
        drawing.text(x, top + height + 18, str(count), "small muted", anchor="middle")
    drawing.text(left + width / 2, top + height + 38, "microbatches in a step", "small", anchor="middle")
    rows: list[tuple[str, list[float | None]]] = []
    for schedule in STAGES_PER_RANK:
        policy, _ = stages(schedule, ranks)
        values = [
            idle_share(timeline(schedule, ranks, count), ranks) if policy.fits(count, ranks) else None
            for count in counts
        ]
        rows.append((schedule, values))
    colors = dict(zip(STAGES_PER_RANK, ("red", "orange", "blue", "green", "purple"), strict=True))
    for schedule, values in rows:
        points = [
            (left + width * i / (len(counts) - 1), top + height * (1 - value / 0.5))
            for i, value in enumerate(values)
            if value is not None
        ]
        drawing.line(*points, kind=f"curve {colors[schedule]}")
        for x, y in points:
            drawing.dot(x, y, colors[schedule])
    y = top + height + 66
    for schedule, values in rows:
        drawing.box(left, y - 10, 12, 12, colors[schedule])
        told = ", ".join("-" if value is None else f"{value:.1%}" for value in values)
        drawing.text(left + 20, y, f"{schedule}: {told}", "small")
        y += 18
    return drawing
