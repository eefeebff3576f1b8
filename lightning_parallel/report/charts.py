"""Charts as inline SVG: lines, areas on each other, and bars. Colors are those of the page, dark or light."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from lightning_parallel.report.scales import Point, bounds, in_words, thinned, ticks

WIDTH, HEIGHT = 440, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 10, 28
_MOST_POINTS = 400
_BAR, _BAR_APART = 20, 18
NUM_COLORS = 8


@dataclass(frozen=True)
class Line:
    """Values over steps.

    Args:
        label: What it is called.
        color: The number of its color.
        points: Steps with values, in order.
        is_dashed: Whether it is a dashed one.
    """

    label: str
    color: int
    points: Sequence[Point]
    is_dashed: bool = False


@dataclass(frozen=True)
class Frame:
    """The area of a chart, in steps and values.

    Args:
        steps: The first and the last step.
        values: The least and the greatest value.
    """

    steps: Point
    values: Point

    def x(self, step: float) -> float:
        """Where a step is."""
        first, last = self.steps
        return _LEFT + (step - first) / (last - first) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Where a value is."""
        low, high = self.values
        return _TOP + (high - value) / (high - low) * (HEIGHT - _TOP - _BOTTOM)

    def axes(self, *, is_share: bool = False) -> Iterator[str]:
        """Lines and words of both axes.

        Args:
            is_share: Whether values are shares, which are shown in percent.
        """
        for value in ticks(*self.values):
            y = self.y(value)
            words = f"{value:.0%}" if is_share else in_words(value)
            yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            yield f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
        for step in ticks(*self.steps):
            x = self.x(step)
            if step == int(step):
                yield f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{in_words(step)}</text>'


def _svg(height: float, title: str, parts: Sequence[str]) -> str:
    inner = "".join(parts)
    label = escape(title, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{label}">{inner}</svg>'


def line_chart(title: str, lines: Sequence[Line], *, from_zero: bool = False) -> str:
    """Lines over steps, in one frame; each says its last value where the mouse is on it.

    Args:
        title: What is shown, for those who do not see it.
        lines: The lines.
        from_zero: Whether the frame begins at 0.
    """
    places = [step for line in lines for step, _ in line.points]
    values = [value for line in lines for _, value in line.points]
    frame = Frame(bounds(places), bounds(values, from_zero=from_zero))
    parts = list(frame.axes())
    for line in lines:
        kind = f'class="line c{line.color % NUM_COLORS}{" dashed" if line.is_dashed else ""}"'
        known = [point for point in line.points if math.isfinite(point[1])]
        says = f"<title>{escape(line.label)}: {in_words(known[-1][1])} in the end</title>" if known else ""
        path = _path(frame, line.points)
        parts.append(f'<path {kind} d="{path}">{says}</path>')
        if len(known) == 1:
            x, y = frame.x(known[0][0]), frame.y(known[0][1])
            parts.append(
                f'<circle class="fill c{line.color % NUM_COLORS}" cx="{x:.1f}" cy="{y:.1f}" r="3">{says}</circle>'
            )
    return _svg(HEIGHT, title, parts)


def _path(frame: Frame, points: Sequence[Point]) -> str:
    """The commands of a path, which has gaps where a value is not finite."""
    stretches: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            stretches[-1].append(point)
        elif stretches[-1]:
            stretches.append([])
    return " ".join(
        ("L" if place else "M") + f"{frame.x(step):.1f} {frame.y(value):.1f}"
        for stretch in stretches
        for place, (step, value) in enumerate(thinned(stretch, _MOST_POINTS))
    )


def area_chart(title: str, layers: Sequence[Line]) -> str:
    """Shares on each other, from 0 to 1, at the same steps.

    Args:
        title: What is shown, for those who do not see it.
        layers: From below; each with a value at each step of the first.
    """
    steps = [step for step, _ in layers[0].points]
    frame = Frame(bounds(steps), (0.0, 1.0))
    below = [0.0] * len(steps)
    parts = []
    for layer in layers:
        above = [base + value for base, (_, value) in zip(below, layer.points, strict=True)]
        there = " L".join(f"{frame.x(s):.1f} {frame.y(v):.1f}" for s, v in _ends(steps, above))
        back = " L".join(f"{frame.x(s):.1f} {frame.y(v):.1f}" for s, v in _ends(steps, below)[::-1])
        says = f"<title>{escape(layer.label)}</title>"
        parts.append(f'<path class="fill c{layer.color % NUM_COLORS}" d="M{there} L{back} Z">{says}</path>')
        below = above
    return _svg(HEIGHT, title, [*parts, *frame.axes(is_share=True)])


def _ends(steps: Sequence[float], values: Sequence[float]) -> list[Point]:
    """Points of an edge; where there is one step alone, it reaches over the whole width."""
    if len(steps) == 1:
        first, last = bounds(steps)
        return [(first, values[0]), (last, values[0])]
    return list(zip(steps, values, strict=True))


def share_bars(title: str, rows: Sequence[tuple[str, Sequence[Line]]]) -> str:
    """A bar for each row, of shares beside each other; those that are wide enough say how much they are.

    Args:
        title: What is shown, for those who do not see it.
        rows: Names with parts, of which the last value is the share.
    """
    parts = []
    for place, (name, shares) in enumerate(rows):
        top = place * (_BAR + _BAR_APART)
        parts.append(f'<text x="0" y="{top + 12}">{escape(_short(name))}</text>')
        edges = [0.0]
        for share in shares:
            edges.append(edges[-1] + share.points[-1][1] * WIDTH)
        for share, (left, right) in zip(shares, pairwise(edges), strict=True):
            value = share.points[-1][1]
            box = f'x="{left:.1f}" y="{top + 16}" width="{max(0.0, right - left):.1f}" height="{_BAR}"'
            says = f"<title>{escape(share.label)} {value:.1%}</title>"
            parts.append(f'<rect class="fill c{share.color % NUM_COLORS}" {box}>{says}</rect>')
            if right - left > 34:
                x = (left + right) / 2
                parts.append(f'<text class="on" x="{x:.1f}" y="{top + 30}" text-anchor="middle">{value:.0%}</text>')
    return _svg(len(rows) * (_BAR + _BAR_APART) + 2, title, parts)


def _short(name: str) -> str:
    return name if len(name) <= 60 else f"...{name[-57:]}"
