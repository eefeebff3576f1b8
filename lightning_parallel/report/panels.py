"""Panels of a page of runs: the values that are beside each other, and their heading."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_parallel.report.charts import Line, area_chart, line_chart, share_bars
from lightning_parallel.report.runs import Run, Series

_BREAKDOWN = "breakdown/"
_STEP_SECONDS = "breakdown/step_seconds"
_PHASES = (
    "forward",
    "backward",
    "forward_backward",
    "optimizer",
    "data",
    "copy",
    "bubble",
    "checkpoint",
    "other",
)
_OF_PHASES = {"forward_backward": 0, "forward": 0, "backward": 1, "bubble": 4}
_COLORS = {"optimizer": 2, "data": 3, "copy": 6, "checkpoint": 7, "other": 5}
_SECTIONS = (
    ("Loss", r"(.*[^a-z])?loss([^a-z].*)?", False),
    ("Throughput", r"throughput/.*|.*(_per_sec|mfu)|breakdown/step_seconds", True),
    ("Memory", r"memory/.*|.*memory.*", True),
    ("Devices and hosts", r"monitor/.*|DeviceStatsMonitor.*", True),
)
"""Headings, the names of their values, and whether these are amounts, whose axis begins at 0."""
_REST = "Other values"


@dataclass(frozen=True)
class Panel:
    """A chart with its heading.

    Args:
        title: The heading.
        svg: The chart.
        key: Labels with the numbers of their colors; empty where the colors are those of runs.
    """

    title: str
    svg: str
    key: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Section:
    """Charts under one heading.

    Args:
        title: The heading.
        panels: The charts.
        is_open: Whether they are seen without a click.
    """

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = True


def sections_of(runs: Sequence[Run]) -> list[Section]:
    """All that was logged, each value in one section; those without any are left out.

    Args:
        runs: The runs, in the order of their colors.
    """
    names = sorted({name for run in runs for name in run.series if not _is_share(name)})
    found, left = [], names
    for title, pattern, from_zero in _SECTIONS:
        own = [name for name in left if re.fullmatch(pattern, name)]
        left = [name for name in left if name not in own]
        found.append(Section(title, tuple(_metric_panels(runs, own, from_zero=from_zero))))
    found.insert(2, Section("Where the time goes", tuple(_breakdowns(runs))))
    found.append(Section(_REST, tuple(_metric_panels(runs, left, from_zero=False)), is_open=False))
    return [section for section in found if section.panels]


def _is_share(name: str) -> bool:
    return name.startswith(_BREAKDOWN) and name != _STEP_SECONDS


def _metric_panels(runs: Sequence[Run], names: Sequence[str], *, from_zero: bool) -> list[Panel]:
    """A chart for each value; the ranks of one, and its forms by step and epoch, are in one."""
    by_title: dict[str, list[str]] = {}
    for name in names:
        by_title.setdefault(re.sub(r"rank\d+/|_(step|epoch)$", "", name), []).append(name)
    return [_metric_panel(runs, title, own, from_zero=from_zero) for title, own in by_title.items()]


def _metric_panel(runs: Sequence[Run], title: str, names: Sequence[str], *, from_zero: bool) -> Panel:
    lines, is_one = [], len(runs) == 1
    for color, run in enumerate(runs):
        for place, name in enumerate(sorted(names, key=_in_order)):
            if name in run.series:
                series = run.series[name]
                points = list(zip(series.steps, series.values, strict=True))
                label = name if is_one else f"{run.name} {name}"
                is_dashed = not is_one and name.endswith("_epoch")
                lines.append(Line(label, place if is_one else color, points, is_dashed))
    key = tuple((line.label, line.color) for line in lines) if is_one and len(lines) > 1 else ()
    return Panel(title, line_chart(title, lines, from_zero=from_zero), key)


def _in_order(name: str) -> tuple[str | int, ...]:
    """Ranks by number."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name))


def _breakdowns(runs: Sequence[Run]) -> list[Panel]:
    """The mean shares of all runs beside each other, and those of each over its steps."""
    shares = {run.name: _shares(run) for run in runs}
    shares = {name: layers for name, layers in shares.items() if layers}
    if not shares:
        return []
    rows = [(name, [_mean(layer) for layer in layers]) for name, layers in shares.items()]
    key = tuple(dict.fromkeys((layer.label, layer.color) for layers in shares.values() for layer in layers))
    panels = [Panel("in the mean", share_bars("shares of a step, in the mean", rows), key)]
    return panels + [Panel(name, area_chart(f"shares of a step: {name}", layers)) for name, layers in shares.items()]


def _shares(run: Run) -> list[Line]:
    """The phases of a run as layers, at the steps that all of them have."""
    series = {name.removeprefix(_BREAKDOWN): each for name, each in run.series.items() if _is_share(name)}
    named = [phase for phase in _PHASES if phase in series and any(series[phase].values)]
    if not named:
        return []
    steps = sorted(set.intersection(*(_known(series[phase]) for phase in named)))
    values = {phase: dict(zip(series[phase].steps, series[phase].values, strict=True)) for phase in named}
    colors = _OF_PHASES | _COLORS
    return [Line(phase, colors[phase], [(s, values[phase][s]) for s in steps]) for phase in named] if steps else []


def _known(series: Series) -> set[int]:
    return {step for step, value in zip(series.steps, series.values, strict=True) if math.isfinite(value)}


def _mean(layer: Line) -> Line:
    values = [value for _, value in layer.points]
    return Line(layer.label, layer.color, [(0.0, sum(values) / len(values))])
