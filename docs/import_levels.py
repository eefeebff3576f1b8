"""Draw the import levels of the package from its code: ``python docs/import_levels.py`` writes ``import_levels.svg``.

A room is a folder of the package or a file at its root. A room is one level above the highest room that it imports. An
arrow leads from a room to one that it imports; arrows that follow from longer paths are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PACKAGE = DOCS.parent / "lightning_parallel"
PICTURE = DOCS / "import_levels.svg"
ROOT = "__init__"
"""The room of the package's own `__init__.py`."""
LISTED = "techniques"
"""The room whose contents are written into its box, since they never import each other."""

Graph = dict[str, set[str]]
"""Name -> the names that it imports."""


# The code ---------------------------------------------------------------------------------------------------------


def module_files() -> dict[str, Path]:
    """Dotted name of each module of the package -> its file; a folder goes by its own name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imported_names(path: Path, *, checks_types: bool = True) -> set[str]:
    """Everything that a file imports, by its full name; ``from a import b`` gives ``a`` and ``a.b``.

    Args:
        path: The file.
        checks_types: Whether imports for type checking count.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names = set()
    for node in set(ast.walk(tree)) - (set() if checks_types else left_out):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def module_graph() -> Graph:
    """Each module -> the modules of the package that it imports, also for type checking or inside of functions."""
    files = module_files()
    graph = {}
    for name, path in files.items():
        found = (imported_names(path) & set(files)) - {name, PACKAGE.name}
        # `from package.folder import file` names the folder, too, but uses only the file.
        graph[name] = {one for one in found if not any(other.startswith(f"{one}.") for other in found)}
    return graph


def room_of(module: str) -> str:
    """The folder or root file of a module."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ROOT


def room_graph() -> Graph:
    """Each room -> the rooms that it imports."""
    graph: Graph = {}
    for module, others in module_graph().items():
        room = room_of(module)
        graph.setdefault(room, set()).update(map(room_of, others))
    return {room: others - {room} for room, others in graph.items()}


def levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    """Each name -> its level, from 1 for what imports nothing.

    Raises:
        graphlib.CycleError: With the circle, if there is one.
    """
    found: dict[str, int] = {}
    for name in TopologicalSorter(graph).static_order():
        found[name] = 1 + max((found[other] for other in graph[name]), default=0)
    return found


def reduced(graph: Graph) -> Graph:
    """`graph` without the imports that follow from longer paths."""
    below: Graph = {}
    for name in TopologicalSorter(graph).static_order():
        below[name] = graph[name].union(*(below[other] for other in graph[name]))
    return {name: {one for one in to if not any(one in below[other] for other in to)} for name, to in graph.items()}


def rooms_with_lightning() -> set[str]:
    """The rooms that import Lightning when they run, and not for type checking only."""
    return {
        room_of(module)
        for module, path in module_files().items()
        if any(name.partition(".")[0] == "lightning" for name in imported_names(path, checks_types=False))
    }


# The picture ------------------------------------------------------------------------------------------------------

FONT, SMALL = 14, 11.5
GAP, ROW_GAP, MARGIN, LANE = 28, 30, 56, 12
LINE = 54
"""Characters in a line of a box's contents."""


@dataclass
class Node:
    """A box, or the place at which an arrow passes a row.

    Args:
        name: Of the room, or empty.
        lines: What is written below the name.
    """

    name: str = ""
    lines: tuple[str, ...] = ()
    x: float = 0
    y: float = 0
    row: tuple[float, float] = (0, 0)
    """The upper and lower border of its row."""

    @property
    def width(self) -> float:
        """From side to side."""
        characters = max([len(self.name) * FONT, *(len(line) * SMALL for line in self.lines)])
        return characters * 0.61 + 24 if self.name else LANE

    @property
    def height(self) -> float:
        """From top to bottom."""
        return 30 + 17 * len(self.lines) + (4 if self.lines else 0) if self.name else 0


@dataclass
class Drawing:
    """Rows of nodes from the top, and the arrows between neighbouring rows."""

    rows: list[list[Node]]
    chains: list[list[Node]]
    """For each arrow, the nodes that it passes, from its room to the one that is imported."""


def arrange(graph: Graph) -> Drawing:
    """Put rooms into rows by level, and order each row so that arrows are short."""
    level = levels(graph)
    top = max(level.values())
    boxes = {room: Node(room, contents(room)) for room in sorted(graph)}
    rows: list[list[Node]] = [[boxes[room] for room in boxes if level[room] == top - row] for row in range(top)]
    chains = []
    for room, others in sorted(reduced(graph).items()):
        for other in sorted(others):
            lanes = [Node() for _ in range(level[room] - level[other] - 1)]
            for row, lane in enumerate(lanes, start=top - level[room] + 1):
                rows[row].append(lane)
            chains.append([boxes[room], *lanes, boxes[other]])
    drawing = Drawing(rows, chains)
    for _ in range(12):
        for is_downwards in (True, False):
            _order(drawing, is_downwards=is_downwards)
    return drawing


def contents(room: str) -> tuple[str, ...]:
    """What is written into the box of a room, in lines."""
    if room != LISTED:
        return ()
    names = sorted({path.stem for path in (PACKAGE / room).iterdir() if not path.name.startswith("__")})
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) + 3 > LINE:
            lines.append("")
        lines[-1] += f"{' · ' if lines[-1] else ''}{name}"
    return tuple(lines)


def _order(drawing: Drawing, *, is_downwards: bool) -> None:
    """Order each row by the middle of what its nodes are connected to in the row before."""
    neighbours: dict[int, list[Node]] = {}
    for chain in drawing.chains:
        for upper, lower in pairwise(chain):
            one, other = (lower, upper) if is_downwards else (upper, lower)
            neighbours.setdefault(id(one), []).append(other)
    for row in drawing.rows if is_downwards else reversed(drawing.rows):
        wanted = {}
        for node in row:
            connected = neighbours.get(id(node), [node])
            wanted[id(node)] = sum(one.x for one in connected) / len(connected)
        row.sort(key=lambda node: wanted[id(node)])
        x = -(sum(node.width for node in row) + GAP * (len(row) - 1)) / 2
        for node in row:
            node.x = x + node.width / 2
            x += node.width + GAP


def picture() -> str:
    """The SVG; colours are chosen to be read on a light page and on a dark one."""
    graph = room_graph()
    edge = rooms_with_lightning()
    drawing = arrange(graph)
    half = max(abs(node.x) + node.width / 2 for row in drawing.rows for node in row)
    width = 2 * (half + MARGIN)
    y = 20.0
    shapes = []
    for number, row in enumerate(drawing.rows):
        height = max(node.height for node in row)
        for node in row:
            node.x += width / 2
            node.y, node.row = y + height / 2, (y, y + height)
        shapes.append(f'<text class="level" x="10" y="{y + height / 2 + 4:.0f}">{len(drawing.rows) - number}</text>')
        shapes += [_box(node, "edge" if node.name in edge else "room") for node in row if node.name]
        y += height + ROW_GAP
    arrows = [_arrow(chain) for chain in drawing.chains]
    size = f"{width:.0f} {y - ROW_GAP + 20:.0f}"
    return "\n".join([_HEAD.format(size=size), *arrows, *shapes, "</svg>", ""])


def _box(node: Node, kind: str) -> str:
    left, top = node.x - node.width / 2, node.y - node.height / 2
    size = f'width="{node.width:.0f}" height="{node.height:.0f}"'
    lines = [
        f'<rect class="{kind}" x="{left:.0f}" y="{top:.0f}" {size} rx="5"/>',
        f'<text class="name" x="{node.x:.0f}" y="{top + 20:.0f}">{node.name}</text>',
    ]
    for number, line in enumerate(node.lines):
        lines.append(f'<text class="small" x="{node.x:.0f}" y="{top + 40 + 17 * number:.0f}">{line}</text>')
    return "\n".join(lines)


def _arrow(chain: list[Node]) -> str:
    """A line that bends between rows, and goes straight down within them."""
    path = f"M{chain[0].x:.0f} {chain[0].y + chain[0].height / 2:.0f}"
    for upper, lower in pairwise(chain):
        (_, y), (end, _) = upper.row, lower.row
        last = lower.y - lower.height / 2 - 5 if lower.name else lower.row[1]
        end = min(end, last)
        middle = (y + end) / 2
        path += f" V{y:.0f} C{upper.x:.0f} {middle:.0f} {lower.x:.0f} {middle:.0f} {lower.x:.0f} {end:.0f}"
        path += f" V{last:.0f}" if last > end else ""
    return f'<path d="{path}"/>'


_HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img">
<title>Import levels of lightning_parallel</title>
<desc>Made from the code by docs/import_levels.py. An arrow leads from a room to one that it imports.</desc>
<style>
text {{ font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; text-anchor: middle }}
.name {{ font-size: 14px; fill: #ffffff }}
.small {{ font-size: 11.5px; fill: #ffffff }}
.level {{ font-size: 12px; fill: #808891; text-anchor: start }}
.room {{ fill: #3566a0 }}
.edge {{ fill: #9a5a16 }}
path {{ fill: none; stroke: #808891; stroke-width: 1.5; marker-end: url(#head) }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<polygon points="0,0 8,4 0,8" fill="#808891"/></marker></defs>"""


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
