"""Meshes of ranks: the degrees of each name, the axes of a product, and who reads what."""

from __future__ import annotations

import math
from collections import defaultdict

from torch.utils.data import DistributedSampler

from drawing.svg import FILLS, MARGIN, Drawing
from lightning_parallel import Degrees
from lightning_parallel.presets import PRESETS
from lightning_parallel.ranks.degrees import Degree
from lightning_parallel.ranks.mesh import AXES, data_rank_of

MACHINES = ((1, 8), (2, 4))
"""Machines, and ranks of each, of the columns of the table of names."""
_COPIES = ("ddp_custom", "zero1_custom")
"""Names without degrees, whose ranks all have equal copies."""
PRODUCT = {"shard": 2, "tensor": 2, "pipeline": 2}
"""Degrees of the mesh with three axes."""


def degrees_of(name: str, machines: int, ranks: int) -> Degrees | None:
    """The degrees that a strategy's name sets; ``None`` for one process over several devices.

    Args:
        name: Such as ``"fsdp_custom"``.
        machines: The number of machines.
        ranks: The ranks of each of them.
    """
    total = machines * ranks
    if name in _COPIES:
        return Degrees(replicate=total, shard=1)
    options = PRESETS[name].options
    if "shard" not in options:
        return None
    given: dict[str, Degree] = {degree: options[degree].default for degree in AXES}
    return Degrees(**given).resolve(total, ranks)


def innermost_of(name: str) -> str:
    """The degree whose ranks are neighbours: as `MeshedStrategy` has it."""
    options = PRESETS[name].options
    return "pipeline" if "pipeline" in options and options["pipeline"].default == "node" else "tensor"


def coordinates(rank: int, degrees: Degrees, innermost: str = "tensor") -> dict[str, int]:
    """A rank's place on each axis, as the mesh numbers them."""
    order = sorted(AXES, key=lambda name: name == innermost)
    found = {}
    for name in reversed(order):
        size = int(getattr(degrees, name))
        rank, found[name] = divmod(rank, size)
    return found


def in_words(degrees: Degrees) -> str:
    """The degrees above 1, outermost first."""
    return ", ".join(f"{name}={size}" for name in AXES if (size := getattr(degrees, name)) != 1) or "all 1"


def draw_names() -> Drawing:
    """Ranks of each name on one machine of eight, and on two of four."""
    drawing = Drawing(
        "The ranks of each strategy name on one machine and on two; ranks of one color read the same samples",
        "Computed from lightning_parallel.presets and Degrees.resolve.",
    )
    cell, gap, left = 26.0, 10.0, 190.0
    column = 8 * cell + 2 * gap + 40
    drawing.text(MARGIN, MARGIN + 14, "Ranks of each name: one color reads one batch", "title")
    y = 62.0
    for number, (machines, ranks) in enumerate(MACHINES):
        label = f"{machines} machine of {ranks} ranks" if machines == 1 else f"{machines} machines of {ranks} ranks"
        drawing.text(left + number * column, y, label, "label bold")
    y += 12
    for name in PRESETS:
        drawing.text(MARGIN, y + 18, name, "label")
        for number, (machines, ranks) in enumerate(MACHINES):
            _name_on(drawing, left + number * column, y, name, machines, ranks, cell=cell, gap=gap)
        y += cell + 24
    return drawing


def _name_on(
    drawing: Drawing, x: float, y: float, name: str, machines: int, ranks: int, *, cell: float, gap: float
) -> None:
    degrees = degrees_of(name, machines, ranks)
    if degrees is None:
        text = "one process over its devices" if machines == 1 else "refused"
        width = 8 * cell + gap * (machines - 1)
        drawing.named_box(x, y, width, cell, text, "gray", dashed=machines > 1)
        return
    for rank in range(machines * ranks):
        data = data_rank_of(rank, degrees, innermost=innermost_of(name))
        place = x + rank * cell + rank // ranks * gap
        drawing.named_box(place, y, cell, cell, str(rank), FILLS[data % len(FILLS)])
    drawing.text(x, y + cell + 13, in_words(degrees), "small muted")


def draw_cube() -> Drawing:
    """A mesh with three axes, as a cube of ranks."""
    degrees = Degrees(**PRODUCT).resolve(math.prod(PRODUCT.values()))
    drawing = Drawing(
        f"Eight ranks as a mesh of {in_words(degrees)}",
        "Places are those that lightning_parallel.ranks.mesh numbers.",
    )
    drawing.text(MARGIN, MARGIN + 14, f"fsdp_custom:tensor=2,pipeline=2 on 8 ranks: {in_words(degrees)}", "title")
    origin, steps = (120.0, 240.0), {"tensor": (170.0, 0.0), "pipeline": (0.0, -130.0), "shard": (300.0, -46.0)}
    width, height = 104.0, 54.0

    def place(at: dict[str, int]) -> tuple[float, float]:
        return tuple(origin[i] + sum(steps[axis][i] * at[axis] for axis in steps) for i in (0, 1))  # type: ignore[return-value]

    places = {rank: coordinates(rank, degrees) for rank in range(8)}
    for one in range(8):
        for other in range(one + 1, 8):
            if sum(places[one][axis] != places[other][axis] for axis in steps) == 1:
                ends = [place(places[each]) for each in (one, other)]
                drawing.line(*((x + width / 2, y + height / 2) for x, y in ends))
    for rank, at in sorted(places.items(), key=lambda each: -each[1]["shard"]):
        x, y = place(at)
        text = f"rank {rank}\nstage {at['pipeline']}, part {at['tensor']}\nbatch {at['shard']}"
        drawing.named_box(x, y, width, height, text, "blue" if at["shard"] == 0 else "orange")
    x, y = MARGIN, 336.0
    drawing.text(x, y, "tensor (left to right): share each layer, several all-reduces a layer", "small")
    drawing.text(x, y + 18, "pipeline (upwards): hand on hidden states, once a microbatch", "small")
    drawing.text(x, y + 36, "shard (to the back): read other samples, gather parameters, reduce gradients", "small")
    return drawing


def draw_groups() -> Drawing:
    """The groups of ranks on each axis of the same mesh."""
    degrees = Degrees(**PRODUCT).resolve(math.prod(PRODUCT.values()))
    drawing = Drawing(
        f"The groups of ranks on each axis of {in_words(degrees)}",
        "Computed from the order of axes in lightning_parallel.ranks.mesh.",
    )
    drawing.text(MARGIN, MARGIN + 14, "Who sends to whom on each axis: one color is one group", "title")
    cell, left, y = 44.0, 120.0, 54.0
    uses = {
        "tensor": "hidden states, inside each layer",
        "shard": "parameters and gradients, once a layer",
        "pipeline": "hidden states, between stages",
    }
    for axis, use in uses.items():
        groups: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for rank in range(8):
            at = coordinates(rank, degrees)
            groups[tuple(at[name] for name in AXES if name != axis)].append(rank)
        color = {rank: FILLS[n] for n, ranks in enumerate(groups.values()) for rank in ranks}
        drawing.text(MARGIN, y + 20, axis, "label bold")
        for rank in range(8):
            drawing.named_box(left + cell * rank, y, cell, 30, str(rank), color[rank], "label")
        drawing.text(left + cell * 8 + 14, y + 20, use, "small")
        y += 44
    drawing.text(
        MARGIN, y + 6, "Neighbours share a machine: the axis that sends most, tensor, is the innermost.", "small"
    )
    return drawing


def draw_samples() -> Drawing:
    """The samples of a global batch, dealt out to the ranks of three strategies."""
    drawing = Drawing(
        "The samples that each of four ranks reads of an unshuffled loader with batch_size=2, under three strategies",
        "Places among the readers are those of lightning_parallel.ranks.mesh.data_rank_of.",
    )
    drawing.text(MARGIN, MARGIN + 14, "Samples of the first two steps, batch_size=2, four ranks", "title")
    cell, y = 30.0, 56.0
    for name in ("fsdp_custom", "fsdp_custom:tensor=2", "tp_custom"):
        option = {"tensor": 2} if ":" in name else {"tensor": 4} if name == "tp_custom" else {}
        degrees = Degrees(**option).resolve(4)
        drawing.text(MARGIN, y, f"{name}: {in_words(degrees)}; a step reads {2 * degrees.data} samples", "label")
        y += 10
        for rank in range(4):
            drawing.text(MARGIN, y + 16, f"rank {rank}", "small muted")
            data = data_rank_of(rank, degrees)
            sampler = DistributedSampler(range(16), num_replicas=degrees.data, rank=data, shuffle=False)
            samples = list(sampler)
            for step in range(2):
                for item in range(2):
                    sample = samples[step * 2 + item]
                    x = 80 + step * (2 * cell + 20) + item * cell
                    drawing.named_box(x, y, cell, 22, str(sample), FILLS[data])
            y += 22
        y += 26
    return drawing


def draw_hybrid() -> Drawing:
    """Shards and copies under `hsdp_custom` on two machines."""
    degrees = degrees_of("hsdp_custom", *MACHINES[1])
    assert degrees is not None
    drawing = Drawing(
        f"hsdp_custom on two machines of four ranks: {in_words(degrees)}",
        "Degrees are those that the name sets; places are those of the mesh.",
    )
    drawing.text(MARGIN, MARGIN + 14, f"hsdp_custom on two machines of four ranks: {in_words(degrees)}", "title")
    cell, gap, y = 92.0, 12.0, 76.0
    for rank in range(8):
        at = coordinates(rank, degrees)
        x, top = MARGIN + 96 + at["shard"] * (cell + gap), y + at["replicate"] * 112
        drawing.named_box(x, top, cell, 40, f"rank {rank}\nshard {at['shard']}", FILLS[at["shard"]])
        if at["shard"] == 0:
            drawing.text(MARGIN, top + 24, f"machine {at['replicate']}", "label")
            end = MARGIN + 96 + 4 * cell + 3 * gap
            drawing.text(end + 12, top + 18, "parameters are gathered,", "small")
            drawing.text(end + 12, top + 32, "gradients reduce-scattered", "small")
        if at["replicate"] == 0:
            drawing.arrow((x + cell / 2 - 8, top + 42), (x + cell / 2 - 8, top + 108))
            drawing.arrow((x + cell / 2 + 8, top + 108), (x + cell / 2 + 8, top + 42))
    text = "Arrows: the gradient of each shard, a quarter of all gradients here, is all-reduced between its copies."
    drawing.text(MARGIN, y + 180, text, "small muted")
    return drawing
