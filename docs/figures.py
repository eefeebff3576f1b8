"""Draw the figures of the documentation: ``python docs/figures.py`` writes ``docs/figures/*.svg``.

Timelines, meshes, placements and bytes are computed from the package; plots are drawn from what is committed in
`docs/benchmarks/`. A test fails while a committed figure is not what this script makes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from drawing import flows, meshes, placements, plots, schedules, sequences, sizing, splits, sums
from drawing.svg import Drawing

FOLDER = Path(__file__).resolve().parent / "figures"

FIGURES: dict[str, Callable[[], Drawing]] = {
    **{f"schedule_{name}": partial(schedules.draw_timeline, name) for name in schedules.STAGES_PER_RANK},
    "schedule_batch_loss": partial(schedules.draw_timeline, "1f1b", joins=True),
    "schedule_activations": schedules.draw_in_flight,
    "schedule_idle": schedules.draw_idle,
    "mesh_names": meshes.draw_names,
    "mesh_cube": meshes.draw_cube,
    "mesh_groups": meshes.draw_groups,
    "mesh_samples": meshes.draw_samples,
    "mesh_hybrid": meshes.draw_hybrid,
    "held_by_rank": placements.draw_held,
    "sharding_units": placements.draw_units,
    "gathered_in_step": placements.draw_gathered,
    "tensor_maps": splits.draw_splits,
    "tensor_branches": splits.draw_branches,
    "pipeline_stages": splits.draw_stages,
    "measured_memory_names": plots.draw_memory_of_names,
    "measured_memory_policies": plots.draw_memory_of_policies,
    "measured_scaling": plots.draw_scaling,
    "measured_bytes": plots.draw_sent,
    "measured_bubble": plots.draw_bubble,
    "measured_checkpoints": plots.draw_checkpoints,
    "measured_accumulation": plots.draw_accumulation,
    "ring_all_reduce": sums.draw_ring_all_reduce,
    "zero_stages": sums.draw_zero,
    "unit_in_step": sums.draw_unit,
    "accumulation_window": sums.draw_window,
    "ulysses": sequences.draw_ulysses,
    "ring_attention": sequences.draw_ring_attention,
    "choosing": flows.draw_choice,
    "first_step": flows.draw_first_step,
    "checkpoint_forms": flows.draw_checkpoint_forms,
    "failing_rank": flows.draw_failure,
    "sizes": sizing.draw_sizes,
}
"""Name of a file in `docs/figures/`, without its ending -> what draws it."""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg(), encoding="utf-8")
