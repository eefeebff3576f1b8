"""Split linear maps and cut stacks of the same GPT, from its plans."""

from __future__ import annotations

from drawing.placements import MODEL, plan_of
from drawing.svg import MARGIN, Drawing

_SCALE = 0.12
"""Pixels for an element of a matrix."""


def draw_splits() -> Drawing:
    """The linear maps of a layer, split over two ranks."""
    tensor = plan_of(2, tensor=2).tensor
    assert tensor is not None
    first = tensor.splits[0].layer
    splits = [split for split in tensor.splits if split.layer == first]
    drawing = Drawing(
        "The linear maps of a layer, split over two ranks by columns and by rows",
        f"Computed from the plan for {MODEL}, under tensor=2.",
    )
    drawing.text(MARGIN, MARGIN + 14, f"tensor=2: the weights of {first} on two ranks", "title")
    drawing.text(MARGIN, MARGIN + 34, "A weight has its outputs as rows, as nn.Linear keeps it.", "small muted")
    y, x = 84.0, MARGIN
    for split in splits:
        rows, columns = split.shape
        height, width = rows * _SCALE, columns * _SCALE
        box = max(width, 128.0)
        left = x + (box - width) / 2
        if split.role == "colwise":
            drawing.box(left, y, width, height / 2, "blue")
            drawing.box(left, y + height / 2, width, height / 2, "orange")
        else:
            drawing.box(left, y, width / 2, height, "blue")
            drawing.box(left + width / 2, y, width / 2, height, "orange")
        drawing.text(x + box / 2, y - 8, split.name, "small", anchor="middle")
        drawing.text(x + box / 2, y + height + 16, split.role, "small", anchor="middle")
        shapes = f"{list(split.shape)} -> {list(split.local_shape)}"
        drawing.text(x + box / 2, y + height + 30, shapes, "tiny muted", anchor="middle")
        x += box + 14
    y += max(split.shape[0] for split in splits) * _SCALE + 60
    drawing.key(MARGIN, y, {"blue": "on rank 0", "orange": "on rank 1"})
    return drawing


def draw_branches() -> Drawing:
    """The way of hidden states through a split layer, with its collectives, without and with `sequence`."""
    drawing = Drawing(
        "Hidden states through the two branches of a layer under tensor=2, and what the ranks send",
        "The maps are those of the plan for the GPT of recipes/byte_lm; collectives are as in docs/tensor_parallel.md.",
    )
    tensor = plan_of(2, tensor=2).tensor
    assert tensor is not None
    first = tensor.splits[0].layer
    names = {
        role: [s.name for s in tensor.splits if s.layer == first and s.role == role] for role in ("colwise", "rowwise")
    }
    drawing.text(MARGIN, MARGIN + 14, "A layer under tensor=2: what each rank computes, and what they send", "title")
    y = 62.0
    for title, opening, closing, between in (
        ("sequence=false", "", "all-reduce", "whole"),
        ("sequence=true", "all-gather", "reduce-scatter", "1/2 of positions"),
    ):
        drawing.text(MARGIN, y, title, "label bold")
        for rank, color in ((0, "blue"), (1, "orange")):
            top, x = y + 16 + rank * 58, MARGIN
            steps: list[tuple[str, str]] = [(f"norm\n{between}", "gray")]
            for opens, closes in (
                (["query, key,", "value"], names["rowwise"][0]),
                ([names["colwise"][-1]], names["rowwise"][1]),
            ):
                steps.append(("\n".join(opens) + "\ncolumns", color))
                steps.append((f"{closes.removeprefix('attention.')}\nrows", color))
                steps.append((f"residual\n{between}", "gray"))
            for number, (text, fill) in enumerate(steps):
                width = 108.0
                drawing.named_box(x, top, width, 48, text, fill, "small")
                if number < len(steps) - 1:
                    drawing.arrow((x + width, top + 24), (x + width + 26, top + 24))
                x += width + 26
        for number in (0, 2, 3, 5):
            x = MARGIN + number * 134 + 108
            word = opening if number in (0, 3) else closing
            if word:
                drawing.line((x + 13, y + 12), (x + 13, y + 126), kind="thin")
                drawing.text(x + 13, y + 140, word, "small", anchor="middle")
        y += 182
    drawing.text(MARGIN, y - 10, "Backward sends the same, in the opposite direction.", "small muted")
    return drawing


def draw_stages() -> Drawing:
    """The layers of each stage under three ways to cut the stack."""
    drawing = Drawing(
        "The layers of each pipeline stage and the rank that holds it",
        f"Computed from the plans for {MODEL}.",
    )
    drawing.text(MARGIN, MARGIN + 14, f"Stages of {MODEL}", "title")
    colors, cell, y = ("blue", "orange", "green", "purple"), 46.0, 58.0
    for ranks in (2, 4):
        pipeline = plan_of(ranks, pipeline=ranks).pipeline
        assert pipeline is not None
        stages = pipeline.stages
        drawing.text(MARGIN, y, f"pipeline={ranks}", "label bold")
        x, y = MARGIN, y + 12
        for stage in range(stages.num_stages):
            layers, color = stages.layers_of(stage), colors[stages.rank_of(stage)]
            begin = x
            if stage == 0:
                drawing.named_box(x, y, 84, 40, "embeddings", color)
                x += 84
            for layer in layers:
                drawing.named_box(x, y, cell, 40, f"layer\n{layer}", color)
                x += cell
            if stage == stages.last:
                drawing.named_box(x, y, 84, 40, "norm, head", color)
                x += 84
            text = f"rank {stages.rank_of(stage)}: {pipeline.numel[stage] / 1e6:.1f} M"
            drawing.text((begin + x) / 2, y + 56, text, "small", anchor="middle")
            x += 22
            if stage < stages.last:
                drawing.arrow((x - 21, y + 20), (x - 1, y + 20))
        y += 92
    drawing.text(
        MARGIN, y - 8, "M: millions of parameters. Arrows: hidden states forward, their gradients back.", "small muted"
    )
    return drawing
