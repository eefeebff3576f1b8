"""Draw the figures of the documentation: ``python docs/figures.py`` writes ``docs/figures/*.svg``.

Timelines, meshes, placements and bytes are computed from the package; plots are drawn from what is committed in
`docs/benchmarks/`. A test fails while a committed figure is not what this script makes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from drawing import schedules
from drawing.svg import Drawing

FOLDER = Path(__file__).resolve().parent / "figures"

FIGURES: dict[str, Callable[[], Drawing]] = {
    **{f"schedule_{name}": partial(schedules.draw_timeline, name) for name in schedules.STAGES_PER_RANK},
    "schedule_batch_loss": partial(schedules.draw_timeline, "1f1b", joins=True),
    "schedule_activations": schedules.draw_in_flight,
    "schedule_idle": schedules.draw_idle,
}
"""Name of a file in `docs/figures/`, without its ending -> what draws it."""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
