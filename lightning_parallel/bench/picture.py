"""Ideal and measured scaling as a picture, which needs matplotlib, from the extra ``bench``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_parallel.bench.cells import BASE, STRONG, WEAK
from lightning_parallel.bench.processes import RAN
from lightning_parallel.bench.summary import Summary

_GRAY = "#757c84"
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
    bar reaches from the fastest to the slowest repeat.

    Args:
        summaries: Of all cells.
        paths: Files; their endings say in which format each is written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    kinds = [kind for kind in (WEAK, STRONG) if any(each.cell.scaling == kind for each in summaries)] or [WEAK]
    rows = list(dict.fromkeys(each.cell.row for each in summaries if each.efficiency is not None))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.4 * len(kinds) + 1.6, 0.26 * len(rows) + 1.4), layout="constrained")
        panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
        for panel, kind in zip(panels, kinds, strict=True):
            _draw_panel(panel, kind, [each for each in summaries if each.cell.scaling in (kind, BASE)], rows)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
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
