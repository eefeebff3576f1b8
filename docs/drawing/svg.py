"""A picture of boxes, lines and texts as SVG, which a light page shows as well as a dark one."""

from __future__ import annotations

import html
from dataclasses import dataclass, field

MARGIN = 16.0
"""Pixels around everything."""
WIDTH_OF_A_LETTER = 0.6
"""Estimated, in multiples of the size of a font; DejaVu Sans, which is wide, has 0.59 on average."""
SIZES = {"title": 15.0, "label": 12.5, "small": 11.0, "tiny": 9.5}
"""Kind of text -> the size of its font in pixels."""

COLORS = {
    # class: (on a light page, on a dark one)
    "paper": ("#ffffff", "#12161b"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#57606a", "#9ea7b1"),
    "rule": ("#8c959f", "#6e7681"),
    "blue": ("#cfe3fb", "#17406d"),
    "orange": ("#fbdcc0", "#6b3d12"),
    "green": ("#cdebd2", "#1d4f2c"),
    "purple": ("#e3d6f7", "#45306b"),
    "red": ("#f9d2d2", "#6c2729"),
    "yellow": ("#f7ecb5", "#574a10"),
    "teal": ("#c9ecec", "#12494c"),
    "gray": ("#eceff2", "#262c33"),
}
"""Class -> its color on a light page, and on a dark one. Text is `ink` on any fill, and `muted` on `paper` or gray."""
FILLS = tuple(name for name in COLORS if name not in ("paper", "ink", "muted", "rule"))
"""Colors of boxes."""


@dataclass(frozen=True)
class Label:
    """Where a text is, as far as the estimated width of its letters tells."""

    text: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Label) -> bool:
        """Whether the two lie on each other."""
        is_beside = self.right <= other.left or other.right <= self.left
        return not (is_beside or self.bottom <= other.top or other.bottom <= self.top)


@dataclass
class Drawing:
    """Shapes in the order in which they are painted; x to the right and y down, in pixels.

    Args:
        title: What the picture shows, for those who do not see it.
        about: What it is made from, in a sentence.
    """

    title: str
    about: str
    shapes: list[str] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    right: float = 0.0
    bottom: float = 0.0

    def box(
        self, x: float, y: float, width: float, height: float, color: str = "gray", *, dashed: bool = False
    ) -> None:
        """Paint a rectangle with a thin edge, dashed if it stands for something that is not there."""
        self._reach(x + width, y + height)
        kind = f"{color} dashed" if dashed else color
        self.shapes.append(f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"/>')

    def text(
        self, x: float, y: float, text: str, kind: str = "label", *, anchor: str = "start", turned: bool = False
    ) -> None:
        """Write a line.

        Args:
            x: Where it is anchored.
            y: Its base line.
            text: The line.
            kind: One of `SIZES`; with " muted" behind it, in gray, and with " bold", in bold.
            anchor: ``"start"``, ``"middle"`` or ``"end"``.
            turned: Whether it goes upwards, around the anchor.
        """
        size = SIZES[kind.split()[0]]
        is_wide = "bold" in kind or kind.startswith("title")
        width = len(text) * size * WIDTH_OF_A_LETTER * (1.06 if is_wide else 1.0)
        before = {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        if turned:
            label = Label(text, x - 0.8 * size, y - (width - before), x + 0.2 * size, y + before)
        else:
            label = Label(text, x - before, y - 0.8 * size, x - before + width, y + 0.2 * size)
        self.labels.append(label)
        self._reach(label.right, label.bottom)
        end = "" if anchor == "start" else f' text-anchor="{anchor}"'
        turn = f' transform="rotate(-90 {_n(x)} {_n(y)})"' if turned else ""
        self.shapes.append(f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}"{end}{turn}>{html.escape(text)}</text>')

    def named_box(
        self, x: float, y: float, width: float, height: float, lines: str, color: str = "gray", kind: str = "small",
        *, dashed: bool = False,
    ) -> None:  # fmt: skip
        """Paint a rectangle with lines of text in its middle; lines are separated by newlines."""
        self.box(x, y, width, height, color, dashed=dashed)
        texts = lines.split("\n")
        step = SIZES[kind.split()[0]] * 1.3
        first = y + height / 2 - step * (len(texts) - 1) / 2 + SIZES[kind.split()[0]] * 0.35
        for number, text in enumerate(texts):
            if text:
                self.text(x + width / 2, first + step * number, text, kind, anchor="middle")

    def line(self, *points: tuple[float, float], kind: str = "line") -> None:
        """Draw a line through points; `kind` is ``"line"``, ``"thin"``, or ``"curve"`` and a color's name."""
        for x, y in points:
            self._reach(x, y)
        path = "M" + " L".join(f"{_n(x)} {_n(y)}" for x, y in points)
        self.shapes.append(f'<path class="{kind}" d="{path}"/>')

    def arrow(self, *points: tuple[float, float]) -> None:
        """Draw a line through points, with a head at the last one."""
        self.line(*points, kind="line arrow")

    def dot(self, x: float, y: float, color: str, radius: float = 4.0) -> None:
        """Paint a small circle."""
        self._reach(x + radius, y + radius)
        self.shapes.append(f'<circle class="{color}" cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}"/>')

    def key(self, x: float, y: float, entries: dict[str, str]) -> None:
        """Write what colors mean, in a row from `x` on; color -> meaning."""
        for color, meaning in entries.items():
            self.box(x, y - 10, 12, 12, color)
            self.text(x + 18, y, meaning, "small")
            x = self.labels[-1].right + 18

    @property
    def size(self) -> tuple[float, float]:
        """Width and height."""
        return self.right + MARGIN, self.bottom + MARGIN

    def svg(self) -> str:
        """The file's contents."""
        width, height = self.size
        head = _HEAD.format(
            width=_n(width), height=_n(height), title=html.escape(self.title), about=html.escape(self.about)
        )
        paper = f'<rect class="paper" width="{_n(width)}" height="{_n(height)}" rx="8"/>'
        return "\n".join([head, paper, *self.shapes, "</svg>", ""])

    def _reach(self, x: float, y: float) -> None:
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)


def contrast(one: str, other: str) -> float:
    """How much two colors differ in lightness, from 1 to 21, as WCAG 2 has it: 4.5 is enough for small text."""
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def _luminance(color: str) -> float:
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _n(number: float) -> str:
    """A number with at most one digit behind the point, always written in the same way."""
    text = f"{number:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


def _style(index: int) -> str:
    color = {name: pair[index] for name, pair in COLORS.items()}
    fills = " ".join(f".{name} {{ fill: {color[name]} }}" for name in ("paper", *FILLS))
    return (
        f"{fills} text {{ fill: {color['ink']} }} .muted {{ fill: {color['muted']} }} "
        f"rect, circle, path {{ stroke: {color['rule']} }} marker polygon {{ fill: {color['rule']}; stroke: none }} "
        + " ".join(f".curve.{name} {{ stroke: {pair[1 - index]} }}" for name, pair in COLORS.items() if name in FILLS)
    )


_HEAD = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{width}} {{height}}" width="{{width}}" height="{{height}}"
  role="img">
<title>{{title}}</title>
<desc>Made by docs/figures.py. {{about}}</desc>
<style>
text {{{{ font-family: "DejaVu Sans", system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif }}}}
{chr(10).join(f".{name} {{{{ font-size: {size:g}px }}}}" for name, size in SIZES.items())}
.title, .bold {{{{ font-weight: 600 }}}}
path {{{{ stroke-width: 1.3 }}}} path.thin {{{{ stroke-width: 0.6 }}}} path.curve {{{{ stroke-width: 2.2 }}}}
path, path.curve {{{{ fill: none }}}}
rect {{{{ stroke-width: 0.8 }}}}
.paper {{{{ stroke: none }}}} .dashed {{{{ stroke-dasharray: 4 3; fill-opacity: 0.35 }}}}
.arrow {{{{ marker-end: url(#head) }}}}
{_style(0).replace("{", "{{").replace("}", "}}")}
@media (prefers-color-scheme: dark) {{{{
{_style(1).replace("{", "{{").replace("}", "}}")}
}}}}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<polygon points="0,0 8,4 0,8"/></marker></defs>"""
