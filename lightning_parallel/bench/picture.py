"""Ideal and measured scaling as a picture, which needs matplotlib, from the extra ``bench``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_parallel.bench.cells import BASE, STRONG, WEAK
from lightning_parallel.bench.processes import RAN
from lightning_parallel.bench.published import PUBLISHED
from lightning_parallel.bench.summary import Summary

_GRAY = "#757c84"
_BELOW = 2.6
"""The height of the panel with published curves, in inches."""
_APART = 0.3
"""Between the first and the last point of a row, in rows, so that bars do not lie on each other."""
_COLORS = ("#757c84", "#2f81d6", "#d9822b", "#3d9a50", "#a566c4", "#cf5560")
"""Between dark and light, so that both grounds leave them readable."""
_TITLES = {WEAK: "weak scaling: the same batch a device", STRONG: "strong scaling: the same global batch"}
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "bench",
    "text.color": _GRAY,
    "axes.labelcolor": _GRAY,
    "axes.edgecolor": _GRAY,
    "xtick.color": _GRAY,
    "ytick.color": _GRAY,
    "font.size": 9.5,
}


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(summaries: Sequence[Summary], paths: Sequence[Path]) -> None:
    """Draw how much faster each row is on more devices, beside what would be ideal; on a transparent ground.

    A row has a point for each number of devices, at its samples per second in multiples of the row's own on the
    smallest number of devices. A dashed line in the color of that number is where the point would be ideally, and a
    bar reaches from the fastest to the slowest repeat. Below, the weak scaling of all rows is beside what others have
    published of GPUs.

    Args:
        summaries: Of all cells.
        paths: Files; their endings say in which format each is written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = [kind for kind in (WEAK, STRONG) if any(each.cell.scaling == kind for each in summaries)] or [WEAK]
    rows = list(dict.fromkeys(each.cell.row for each in summaries if each.efficiency is not None))
    with mpl.rc_context(_STYLE):
        height = 0.26 * len(rows) + 1.4
        has_weak = any(each.cell.scaling == WEAK and each.efficiency is not None for each in summaries)
        figure = Figure(figsize=(4.4 * len(kinds) + 1.6, height + _BELOW * has_weak), layout="constrained")
        upper, *lower = figure.subfigures(
            1 + has_weak, 1, squeeze=False, height_ratios=[height, _BELOW][: 1 + has_weak]
        )[:, 0]
        panels = upper.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for panel, kind in zip(panels, kinds, strict=True):
            _draw_panel(panel, kind, [each for each in summaries if each.cell.scaling in (kind, BASE)], rows)
        handles, labels = panels[0].get_legend_handles_labels()
        upper.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        for below in lower:
            _draw_published(below.subplots(), [each for each in summaries if each.cell.scaling in (WEAK, BASE)])
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            figure.savefig(path, transparent=True, dpi=160, metadata=metadata)


def _draw_panel(panel: Any, kind: str, summaries: Sequence[Summary], rows: Sequence[str]) -> None:
    from matplotlib.ticker import MaxNLocator

    numbers = sorted({each.cell.devices for each in summaries})
    places = {row: len(rows) - 1 - index for index, row in enumerate(rows)}
    apart = _APART / max(1, len(numbers) - 1)
    for index, (number, color) in enumerate(zip(numbers, _cycled(len(numbers)), strict=True)):
        own = [each for each in summaries if each.cell.devices == number and each.efficiency is not None]
        ideal = number / numbers[0]
        panel.axvline(ideal, color=color, linestyle="--", linewidth=1.1, zorder=1)
        xs = [ideal * (each.efficiency or 0) for each in own]
        ends = [_ends(each, x) for each, x in zip(own, xs, strict=True)]
        panel.errorbar(
            xs,
            [places[each.cell.row] + _APART / 2 - index * apart for each in own],
            xerr=[[low for low, _ in ends], [high for _, high in ends]],
            fmt="o",
            markersize=5,
            linewidth=1.4,
            color=color,
            label=f"{number} device{'s' if number > 1 else ''} (dashed: ideal)",
            zorder=2,
        )
    panel.set_yticks(list(places.values()), list(places), family="monospace")
    smallest = f"{numbers[0]} device{'s' if numbers[0] > 1 else ''}"
    panel.set_xlabel(f"samples per second, in multiples of the row's own on {smallest}")
    panel.xaxis.set_major_locator(MaxNLocator(5))
    panel.set_title(_TITLES[kind], fontsize=10)
    panel.set_xlim(left=0)
    panel.margins(y=0.6 / max(1, len(rows)))
    panel.grid(axis="y", color=_GRAY, alpha=0.25, linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.tick_params(axis="y", length=0)


def _draw_published(panel: Any, summaries: Sequence[Summary]) -> None:
    """The share of its rate that a device keeps: of all rows, and of the published curves."""
    from matplotlib.ticker import PercentFormatter

    smallest = min(each.cell.devices for each in summaries)
    label = "measured here, a line for each row"
    for row in dict.fromkeys(each.cell.row for each in summaries):
        own = sorted(
            (each.cell.devices / smallest, each.efficiency)
            for each in summaries
            if each.cell.row == row and each.efficiency is not None
        )
        if len(own) > 1:
            panel.plot(*zip(*own, strict=True), "o-", color=_COLORS[1], alpha=0.7, markersize=4, label=label)
            label = "_"  # once in the legend
    for curve, color in zip(PUBLISHED, _COLORS[2:], strict=False):
        points = curve.efficiencies
        panel.plot(list(points), list(points.values()), "s--", color=color, markersize=4, label=curve.name)
    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    panel.yaxis.set_major_formatter(PercentFormatter(1))
    panel.set_ylim(bottom=0)
    panel.set_xlabel("devices, in multiples of the smallest number")
    panel.set_title("samples per second and device, beside published weak scaling on GPUs", fontsize=10)
    panel.grid(axis="y", color=_GRAY, alpha=0.25, linewidth=0.8)
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def _ends(summary: Summary, place: float) -> tuple[float, float]:
    """The lengths of the bar to the left and to the right of a point."""
    assert summary.outcome == RAN
    assert summary.seconds
    assert summary.fastest
    assert summary.slowest
    # In this order, a single repeat has a bar of no length, and none that rounding makes negative.
    return place * (1 - summary.seconds / summary.slowest), place * (summary.seconds / summary.fastest - 1)


def _cycled(number: int) -> list[str]:
    return [_COLORS[index % len(_COLORS)] for index in range(number)]
