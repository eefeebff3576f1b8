"""Concepts that are flows: choosing a strategy, the proof of the first step, checkpoints, a rank that fails."""

from __future__ import annotations

from drawing.svg import MARGIN, Drawing
from lightning_parallel.strategies.failures import GRACE

QUESTIONS = (
    # question, the name if the answer is yes, what that name does
    ("Do parameters, gradients and optimizer state\nfit on one device?", "ddp_custom", "a copy on each rank"),
    ("Do they fit without\nthe optimizer state?", "zero1_custom", "state sharded"),
    ("Do the parameters fit, without\ngradients and state?", "zero2_custom", "gradients and state sharded"),
    ("Does a rank's share fit,\nwith one layer whole?", "fsdp_custom", "all sharded, layer by layer"),
    ("Does it fit if shards\nwait in host memory?", "fsdp_offload_custom", "shards on the host"),
)
OTHERS = (
    ("several machines, a slower network between them", "hsdp_custom"),
    ("one sequence is too long for a device", "cp_custom"),
    ("one layer is too large, or fewer samples than devices", "fsdp_tp_custom, tp_custom"),
    ("gathering a layer takes too long, slow network", "pp_custom"),
)


def draw_choice() -> Drawing:
    """The decision tree of the page about choosing."""
    drawing = Drawing("A decision tree: which strategy name to begin with", "The questions of docs/choosing.md.")
    drawing.text(MARGIN, MARGIN + 14, "Which name to begin with", "title")
    width, height, y = 310.0, 46.0, 52.0
    for number, (question, name, what) in enumerate(QUESTIONS):
        drawing.named_box(MARGIN, y, width, height, question, "yellow")
        drawing.arrow((MARGIN + width, y + height / 2), (MARGIN + width + 60, y + height / 2))
        drawing.text(MARGIN + width + 26, y + height / 2 - 6, "yes", "small", anchor="middle")
        drawing.named_box(MARGIN + width + 60, y, 200, height, f"{name}\n{what}", "green")
        if number < len(QUESTIONS) - 1:
            drawing.arrow((MARGIN + width / 2, y + height), (MARGIN + width / 2, y + height + 26))
            drawing.text(MARGIN + width / 2 + 8, y + height + 17, "no", "small")
        y += height + 26
    drawing.text(MARGIN, y + 4, "Or, for another reason:", "label bold")
    y += 16
    for reason, name in OTHERS:
        drawing.named_box(MARGIN, y, 370, 28, reason, "gray")
        drawing.arrow((MARGIN + 370, y + 14), (MARGIN + 400, y + 14))
        drawing.named_box(MARGIN + 400, y, 200, 28, name, "blue")
        y += 36
    drawing.text(
        MARGIN,
        y + 12,
        "If activations do not fit: recompute=full, or a smaller batch with accumulation.",
        "small muted",
    )
    return drawing


def draw_first_step() -> Drawing:
    """What is compared before the first update, and with what."""
    drawing = Drawing(
        "The proof of the first step: the real step is compared with the same step on a plain copy of the module",
        "A drawing of docs/policies.md, 'Comparing the first step'.",
    )
    drawing.text(MARGIN, MARGIN + 14, "The proof of the first step (check=auto)", "title")
    y, width, height = 56.0, 148.0, 54.0
    drawing.named_box(MARGIN, y + 42, 120, height, "first batch,\nrandom state", "gray")
    x = MARGIN + 160
    for row, (boxes, color) in enumerate(
        (
            (
                ("plain copy,\nwhole parameters", "its step,\non this rank", "gradients averaged\nover data ranks"),
                "blue",
            ),
            (("the module,\nmade parallel", "the real step", "gradients, reduced\nby the strategy"), "orange"),
        )
    ):
        top = y + row * 84
        drawing.arrow((MARGIN + 120, y + 42 + height / 2), (x, top + height / 2))
        for number, text in enumerate(boxes):
            place = x + number * (width + 30)
            drawing.named_box(place, top, width, height, text, color)
            if number:
                drawing.arrow((place - 30, top + height / 2), (place, top + height / 2))
        end = x + 3 * width + 60
        drawing.arrow((end, top + height / 2), (end + 36, y + 42 + height / 2))
    place = x + 3 * width + 96
    drawing.named_box(place, y + 42, 130, height, "equal?\nloss, logs,\nmetrics, gradients", "yellow")
    y += 168
    drawing.arrow((place + 40, y - 72), (place - 90, y + 20))
    drawing.arrow((place + 90, y - 72), (place + 65, y + 20))
    drawing.named_box(place - 180, y + 20, 150, height, "yes: the update,\nand a line", "green")
    drawing.named_box(place - 10, y + 20, 150, height, "no: FirstStepError,\nnothing updated", "red")
    return drawing


def draw_checkpoint_forms() -> Drawing:
    """Who writes what in the two forms of a checkpoint."""
    drawing = Drawing(
        "The two forms of a checkpoint: one file by rank 0, or a folder by all ranks",
        "A drawing of docs/how_it_works.md, 'Checkpoints'.",
    )
    drawing.text(MARGIN, MARGIN + 14, "A checkpoint in its two forms", "title")
    for panel, title in enumerate(("checkpoint=whole", "checkpoint=sharded")):
        x, y = MARGIN + panel * 400, 62.0
        drawing.text(x, y - 10, title, "label bold")
        for rank in range(4):
            top = y + rank * 38
            drawing.named_box(x, top, 118, 30, f"shard of rank {rank}", "blue")
            if panel == 0:
                drawing.arrow((x + 118, top + 15), (x + 160, y + 72))
            else:
                drawing.arrow((x + 118, top + 15), (x + 230, top + 15))
                files = f"file of rank {rank}" + (", rest.pt, manifest.json" if rank == 0 else "")
                drawing.named_box(x + 230, top, 262 if rank == 0 else 128, 30, files, "green")
        if panel == 0:
            drawing.named_box(x + 160, y + 42, 96, 60, "rank 0,\none tensor\nat a time", "yellow")
            drawing.arrow((x + 256, y + 72), (x + 286, y + 72))
            drawing.named_box(x + 286, y + 42, 74, 60, "last.ckpt\none file", "green")
    drawing.text(
        MARGIN,
        236,
        "Both: written under a hidden name, brought to the disk, then renamed. Each name and number",
        "small muted",
    )
    drawing.text(MARGIN, 252, "of ranks reads both.", "small muted")
    return drawing


def draw_failure() -> Drawing:
    """What the other ranks do when one raises an error."""
    drawing = Drawing(
        "One rank raises an error: the others are told within a second, and end within the grace",
        "The grace is GRACE of lightning_parallel.strategies.failures.",
    )
    drawing.text(MARGIN, MARGIN + 14, "When one rank raises an error", "title")
    left, y, height = 80.0, 52.0, 30.0
    rows = (
        (("steps", 150, "blue"), ("ValueError", 100, "red"), ("tells all, ends", 130, "gray")),
        (
            ("steps", 190, "blue"),
            (f"waits in a collective, at most {GRACE:.0f} s", 270, "yellow"),
            ("ends, status 1", 110, "red"),
        ),
        (
            ("steps", 190, "blue"),
            (f"waits in a collective, at most {GRACE:.0f} s", 270, "yellow"),
            ("ends, status 1", 110, "red"),
        ),
    )
    for rank, parts in enumerate(rows):
        drawing.text(MARGIN, y + 19, f"rank {rank}", "small muted")
        x = left
        for text, width, color in parts:
            drawing.named_box(x, y, width, height, text, color)
            x += width
        y += height + 10
    drawing.text(
        MARGIN,
        y + 14,
        "The line of the others: rank 0 raised ValueError: ... Rank 1 waits for it in vain, and ends.",
        "small",
    )
    return drawing
