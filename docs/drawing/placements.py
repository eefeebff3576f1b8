"""Places of a small GPT's parameters under each strategy, from the plans that a fit would carry out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from drawing.svg import MARGIN, Drawing
from lightning_parallel import Degrees
from lightning_parallel.plan import Plan, build_plan
from lightning_parallel.policies import Policies
from lightning_parallel.techniques.optimizer_sharding import deal_out
from lightning_parallel.techniques.pipeline.schedules import PipelinePolicy

sys.path.append(str(Path(__file__).resolve().parents[2]))  # for the recipes

SIZES = {"context": 1024, "width": 384, "num_layers": 8, "num_heads": 8}
"""Of the GPT of `recipes/byte_lm`, on the meta device."""
MODEL = "the GPT of recipes/byte_lm, 8 layers of width 384"
_MEBI = 2**20
WORDS = {"blue": "parameters", "orange": "gradients", "green": "state of AdamW"}


@functools.cache
def module() -> nn.Module:
    """The module, without memory for its parameters."""
    from recipes.byte_lm.module import ByteLM

    with torch.device("meta"):
        return ByteLM(**SIZES)


@functools.cache
def plan_of(ranks: int, schedule: str = "1f1b", **degrees: int) -> Plan:
    """The plan on so many ranks."""
    policies = Policies(pipeline=PipelinePolicy(schedule=schedule, virtual_stages=1))
    plan = build_plan(module(), Degrees(**degrees).resolve(ranks), policies)
    assert plan.violations == ()
    return plan


@dataclass(frozen=True)
class Held:
    """Bytes that a rank holds between steps, in fp32 with AdamW.

    Args:
        parameters: Its parameters, or its part of them.
        gradients: Once they have been reduced.
        state: Two moments for each parameter that this rank updates.
    """

    parameters: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.state


def all_bytes() -> int:
    """The bytes of all parameters."""
    return sum(p.numel() * p.element_size() for p in module().parameters())


def held_copies(ranks: int, *, shards_state: bool) -> list[Held]:
    """Under `ddp_custom`, and under `zero1_custom`, whose parameters are dealt out as the package does."""
    sizes = [p.numel() for p in module().parameters()]
    total = 4.0 * sum(sizes)
    if not shards_state:
        return [Held(total, total, 2 * total)] * ranks
    owners = deal_out(sizes, ranks)
    own = [4.0 * sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    return [Held(total, total, 2 * each) for each in own]


def held_shards(ranks: int) -> list[Held]:
    """Under `fsdp_custom`: shares of the units, and all of what stays whole."""
    (sharding,) = plan_of(ranks).sharding
    own = sum(sharding.num_bytes) / ranks + sum(
        4 * p.numel() for n, p in module().named_parameters() if n in sharding.whole
    )
    return [Held(own, own, 2 * own)] * ranks


def held_split(ranks: int) -> list[Held]:
    """Under `tp_custom` on one machine: parts of the linear maps that are split, and all of the rest."""
    tensor = plan_of(ranks, tensor=ranks).tensor
    assert tensor is not None
    parts: dict[str, float] = {}
    for split in tensor.splits:
        name = f"{split.layer}.{split.name}"
        for kind in ("weight", "bias"):
            if kind == "bias" and split.role == "rowwise":
                continue  # added once, behind the sum
            parts[f"{name}.{kind}"] = 1 / ranks if split.role in ("colwise", "rowwise") else 1.0
    own = sum(4 * p.numel() * parts.get(name, 1.0) for name, p in module().named_parameters())
    return [Held(own, own, 2 * own)] * ranks


def held_stages(ranks: int) -> list[Held]:
    """Under `pp_custom` on one machine: the stages of a rank."""
    pipeline = plan_of(ranks, pipeline=ranks).pipeline
    assert pipeline is not None
    own = [4.0 * sum(pipeline.numel[stage] for stage in pipeline.stages.stages_of(rank)) for rank in range(ranks)]
    return [Held(each, each, 2 * each) for each in own]


def held_between_steps(ranks: int) -> dict[str, list[Held]]:
    """Name -> what each rank holds, on one machine."""
    return {
        "ddp_custom": held_copies(ranks, shards_state=False),
        "zero1_custom": held_copies(ranks, shards_state=True),
        "zero2_custom, fsdp_custom": held_shards(ranks),
        "tp_custom": held_split(ranks),
        "pp_custom": held_stages(ranks),
    }


def draw_held() -> Drawing:
    """What four ranks hold under each strategy."""
    ranks = 4
    drawing = Drawing(
        f"Bytes of parameters, gradients and optimizer state that each of {ranks} ranks holds behind backward",
        f"Computed from the plans for {MODEL}, in fp32 with AdamW.",
    )
    drawing.text(MARGIN, MARGIN + 14, "What a rank holds behind backward (fp32, AdamW)", "title")
    drawing.text(MARGIN, MARGIN + 34, f"{MODEL}: {all_bytes() / _MEBI:.0f} MiB of parameters", "small muted")
    left, width, row, y = 264.0, 420.0, 20.0, 74.0
    rows = held_between_steps(ranks)
    scale = width / max(each.total for held in rows.values() for each in held)
    for name, held in rows.items():
        drawing.text(MARGIN, y + row * ranks / 2 + 4, name, "label")
        for rank, own in enumerate(held):
            x = left
            drawing.text(left - 8, y + 14, f"rank {rank}", "tiny muted", anchor="end")
            for color, size in zip(WORDS, (own.parameters, own.gradients, own.state), strict=True):
                drawing.box(x, y, size * scale, row - 3, color)
                x += size * scale
            drawing.text(x + 8, y + 13, f"{own.total / _MEBI:.0f} MiB", "small")
            y += row
        y += 14
    drawing.key(left, y + 12, WORDS)
    return drawing


def draw_units() -> Drawing:
    """The units of sharding, and what four ranks hold of each."""
    ranks = 4
    (sharding,) = plan_of(ranks).sharding
    drawing = Drawing(
        f"The units in which parameters are sharded over {ranks} ranks",
        f"Computed from the plan for {MODEL}, under fsdp_custom.",
    )
    drawing.text(MARGIN, MARGIN + 14, f"fsdp_custom on {ranks} ranks: each unit is cut into {ranks} shards", "title")
    left, cell, row, y = 200.0, 90.0, 24.0, 74.0
    for rank in range(ranks):
        drawing.text(left + cell * (rank + 0.5), y - 10, f"rank {rank}", "small muted", anchor="middle")
    for unit, num_bytes in sorted(
        zip(sharding.units, sharding.num_bytes, strict=True), key=lambda u: (u[0] == "", u[0])
    ):
        drawing.text(MARGIN, y + 16, unit or "the rest (root)", "label")
        for rank in range(ranks):
            text = f"{num_bytes / ranks / _MEBI:.2f} MiB"
            drawing.named_box(left + cell * rank, y, cell - 4, row - 4, text, "blue" if unit else "teal")
        drawing.text(left + cell * ranks + 10, y + 16, f"whole: {num_bytes / _MEBI:.2f} MiB", "small")
        y += row
    drawing.text(
        MARGIN, y + 18, "The root has what is in no layer: embeddings, the last norm, the head.", "small muted"
    )
    return drawing


def gathered(sizes: Sequence[float], root: float, share: float, reshard: str) -> list[tuple[str, float]]:
    """Bytes of parameters on a rank at each moment of a step, without what is gathered ahead.

    Args:
        sizes: Bytes of each layer, whole.
        root: Bytes of what is in no layer, whole; it stays gathered for the whole step.
        share: The part of a rank, such as 1/4.
        reshard: ``"always"`` or ``"never"``.
    """
    held = share * (sum(sizes) + root)
    steps, kept = [("", held), ("", held + root)], 0.0
    for index, size in enumerate(sizes):
        kept = kept + size if reshard == "never" else size
        steps.append((f"F{index + 1}", held + root + kept))
    for index in reversed(range(len(sizes))):
        now = sum(sizes[: index + 1]) if reshard == "never" else sizes[index]
        steps.append((f"B{index + 1}", held + root + now))
    return [*steps, ("", held)]


def draw_gathered() -> Drawing:
    """Parameters on a rank through a step."""
    ranks = 4
    (sharding,) = plan_of(ranks).sharding
    by_unit = dict(zip(sharding.units, sharding.num_bytes, strict=True))
    root = float(by_unit.pop(""))
    assert set(by_unit) == set(plan_of(ranks).structure.layers), "the picture is of layers and the root"
    sizes = [float(size) for size in by_unit.values()]
    drawing = Drawing(
        f"Bytes of parameters on one of {ranks} ranks through a training step",
        f"From the sizes of units in the plan for {MODEL}; the unit that is gathered ahead is left out.",
    )
    drawing.text(MARGIN, MARGIN + 14, f"Parameters on one of {ranks} ranks through a step, in MiB", "title")
    names = {"always": "fsdp_custom (reshard=always)", "never": "zero2_custom (reshard=never)"}
    left, cell, height, y = 64.0, 30.0, 100.0, 54.0
    top = float(all_bytes())
    for reshard, name in names.items():
        drawing.text(MARGIN, y, name, "label")
        y += 14
        steps = gathered(sizes, root, 1 / ranks, reshard)
        scale = height / (1.3 * top)
        drawing.line((left, y + height), (left + cell * len(steps), y + height))
        drawing.line(
            (left, y + height - top * scale), (left + cell * len(steps), y + height - top * scale), kind="thin"
        )
        drawing.text(left - 6, y + height - top * scale + 4, f"{top / _MEBI:.0f}", "small muted", anchor="end")
        held = steps[0][1]
        for number, (moment, size) in enumerate(steps):
            x = left + cell * number
            drawing.box(x, y + height - held * scale, cell - 3, held * scale, "blue")
            if size > held:
                drawing.box(x, y + height - size * scale, cell - 3, (size - held) * scale, "yellow")
            drawing.text(
                x + cell / 2 - 1, y + height - size * scale - 4, f"{size / _MEBI:.0f}", "tiny", anchor="middle"
            )
            if moment:
                drawing.text(x + cell / 2 - 1, y + height + 14, moment, "tiny muted", anchor="middle")
        y += height + 44
    drawing.key(left, y, {"blue": "its shards", "yellow": "gathered"})
    drawing.text(
        MARGIN,
        y + 24,
        f"F1: forward of the first layer, B1: its backward. {top / _MEBI:.0f} MiB: all parameters, whole.",
        "small muted",
    )
    return drawing
