"""Plots of what was measured: the bench's own file, and the tables of the pages about benchmarks."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drawing.svg import MARGIN, Drawing

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
_MEBI = 2**20


def bench_cells() -> list[dict[str, Any]]:
    """The cells of the committed bench that ran."""
    found = json.loads((BENCHMARKS / "bench.json").read_text(encoding="utf-8"))
    return [cell for cell in found["cells"] if cell["outcome"] == "ran"]


def table_of(page: str, first: str) -> list[dict[str, str]]:
    """The rows of a table in a page about benchmarks, by the heads of its columns.

    Args:
        page: Such as ``"memory"``.
        first: The head of its first column.
    """
    text = (BENCHMARKS / f"{page}.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^(\| ?{first} \|.*?)\n\n", text, flags=re.MULTILINE | re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def draw_bars(
    title: str, about: str, rows: Mapping[str, Sequence[tuple[float, str]]], key: Mapping[str, str], *, unit: str
) -> Drawing:
    """Bars from the left, one or several to a row.

    Args:
        title: Above the picture.
        about: What it is drawn from.
        rows: Label -> for each bar its length and its color.
        key: Color -> meaning; empty for none.
        unit: Behind each number.
    """
    drawing = Drawing(title, about)
    drawing.text(MARGIN, MARGIN + 14, title, "title")
    drawing.text(MARGIN, MARGIN + 34, about, "small muted")
    left, width, bar, y = 24 + max(len(row) for row in rows) * 7.0, 380.0, 15.0, 66.0
    longest = max(value for bars in rows.values() for value, _ in bars)
    for label, bars in rows.items():
        drawing.text(MARGIN, y + bar * len(bars) / 2 + 3, label, "small")
        for value, color in bars:
            drawing.box(left, y, width * value / longest, bar - 2, color)
            text = f"{value:.2f}" if longest < 10 else f"{value:.0f}"
            drawing.text(left + width * value / longest + 6, y + 11, f"{text}{unit}", "small")
            y += bar
        y += 8
    if key:
        drawing.key(left, y + 14, dict(key))
    return drawing


def draw_memory_of_policies() -> Drawing:
    """The table of the page about memory."""
    rows = {row["policy"].replace("`", ""): [(float(row["MiB"]), "blue")] for row in table_of("memory", "policy")}
    return draw_bars(
        "Highest memory of a rank within a step, two ranks on the CPU",
        "Measured for a GPT with 10.8 M parameters: the table of docs/benchmarks/memory.md.",
        rows,
        {},
        unit=" MiB",
    )


def draw_memory_of_names() -> Drawing:
    """The bench's memory on one rank and on two, with the same batch a rank."""
    rows: dict[str, list[tuple[float, str]]] = {}
    for devices, color in ((1, "blue"), (2, "orange")):
        for cell in bench_cells():
            if cell["devices"] == devices and cell["scaling"] in ("base", "weak"):
                rows.setdefault(cell["row"], []).append((cell["memory_bytes"] / _MEBI, color))
    return draw_bars(
        "Memory that a rank's steps take, the same batch for each rank",
        "Measured for recipes/byte_lm, 0.5 M parameters, on the CPU: docs/benchmarks/bench.json.",
        rows,
        {"blue": "one rank", "orange": "two ranks"},
        unit=" MiB",
    )


def draw_scaling() -> Drawing:
    """Samples per second on two ranks, in multiples of those on one."""
    rows: dict[str, list[tuple[float, str]]] = {}
    for scaling, color in (("weak", "blue"), ("strong", "orange")):
        for cell in bench_cells():
            if cell["devices"] == 2 and cell["scaling"] == scaling:
                rows.setdefault(cell["row"], []).append((2 * cell["efficiency"], color))
    return draw_bars(
        "Samples per second on two ranks, in multiples of those on one",
        "Two ranks on two cores, 0.5 M parameters: docs/benchmarks/bench.json. Ideal is 2.",
        {name: bars for name, bars in rows.items() if len(bars) == 2},
        {"blue": "the same batch a rank", "orange": "the same global batch"},
        unit=" x",
    )


KINDS = {
    "blue": ("all-reduce",),
    "orange": ("all-gather", "reduce-scatter"),
    "green": ("all-to-all", "send"),
    "yellow": ("broadcast",),
}
"""Color -> the collectives that it stands for."""


def draw_sent() -> Drawing:
    """Bytes that a rank hands to collectives in a step, by kind."""
    title = "MiB that a rank hands to collectives in a step, two ranks"
    drawing = Drawing(
        title, "From docs/benchmarks/bench.json: recipes/byte_lm, 0.5 M parameters, eight samples a rank."
    )
    drawing.text(MARGIN, MARGIN + 14, title, "title")
    cells = [cell for cell in bench_cells() if cell["devices"] == 2 and cell["scaling"] == "weak"]
    gradients = next(cell["collectives"]["all-reduce"][1] for cell in cells if cell["row"] == "loop") / _MEBI
    drawing.text(
        MARGIN,
        MARGIN + 34,
        f"Counted in docs/benchmarks/bench.json; all gradients are {gradients:.2f} MiB.",
        "small muted",
    )
    longest = max(sum(size for _, size in cell["collectives"].values()) for cell in cells)
    left, width, y = 190.0, 400.0, 66.0
    for cell in cells:
        drawing.text(MARGIN, y + 14, cell["row"], "small")
        x = left
        for color, kinds in KINDS.items():
            size = sum(cell["collectives"].get(kind, (0, 0))[1] for kind in kinds)
            if size / longest * width >= 1:
                drawing.box(x, y, width * size / longest, 18, color)
                x += width * size / longest
        total = sum(size for _, size in cell["collectives"].values())
        number = sum(count for count, _ in cell["collectives"].values())
        drawing.text(x + 8, y + 13, f"{total / _MEBI:.1f} in {number:g}", "small")
        y += 26
    drawing.key(left, y + 12, {color: ", ".join(kinds) for color, kinds in KINDS.items()})
    return drawing


def draw_bubble() -> Drawing:
    """The bubble as the order implies it, and as it was measured."""
    rows = {
        row["schedule"].strip("`"): [(float(row["ideal"]), "blue"), (float(row["measured"]), "orange")]
        for row in table_of("pipeline_bubble", "schedule")
    }
    return draw_bars(
        "Share of a step in which two ranks of a pipeline wait, four microbatches",
        "Measured on the CPU: the table of docs/benchmarks/pipeline_bubble.md.",
        rows,
        {"blue": "by the order of the schedule", "orange": "measured"},
        unit="",
    )


def draw_checkpoints() -> Drawing:
    """The time for which training waits for a checkpoint, and until it is there."""
    rows = {
        row["way"].replace("`", ""): [(float(row["blocked s"]), "orange"), (float(row["saved s"]), "blue")]
        for row in table_of("checkpoint", "way")
    }
    return draw_bars(
        "Seconds for which training waits for a checkpoint of 654 MiB, and until it is there",
        "Measured for a GPT with 57 M parameters, two ranks, CPU: docs/benchmarks/checkpoint.md.",
        rows,
        {"orange": "training waits", "blue": "until it is on the disk"},
        unit=" s",
    )


def draw_accumulation() -> Drawing:
    """Collectives in a window of four microsteps."""
    rows = {
        row[""].replace("`", ""): [(float(row["gathers"]), "blue"), (float(row["reduce-scatters"]), "orange")]
        for row in table_of("accumulation", "")
    }
    return draw_bars(
        "Collectives of a rank in a window of four microsteps, seven units",
        "Counted: the table of docs/benchmarks/accumulation.md.",
        rows,
        {"blue": "all-gathers", "orange": "reduce-scatters"},
        unit="",
    )
