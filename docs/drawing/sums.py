"""Concepts of data parallelism: the ring all-reduce, what ZeRO shards, a unit in a step, a window of microsteps."""

from __future__ import annotations

from drawing.svg import MARGIN, Drawing

RANKS = 4


def ring_states(ranks: int) -> list[list[list[frozenset[int]]]]:
    """Chunks of each rank before each step of a ring all-reduce and behind the last, by which ranks' parts are in them.

    In each of the first steps, rank r sends chunk r - step to its neighbour, which adds it to its own; in each of the
    others it sends a finished chunk, which replaces the neighbour's.

    Args:
        ranks: Ranks, and chunks of each.
    """
    now = [[frozenset({rank}) for _ in range(ranks)] for rank in range(ranks)]
    states = [now]
    for step in range(2 * (ranks - 1)):
        then = [list(chunks) for chunks in now]
        for rank in range(ranks):
            adds = step < ranks - 1
            chunk = (rank - step) % ranks if adds else (rank + 1 - (step - ranks + 1)) % ranks
            other = (rank + 1) % ranks
            then[other][chunk] = now[rank][chunk] | (now[other][chunk] if adds else frozenset())
        states.append(now := then)
    return states


def draw_ring_all_reduce() -> Drawing:
    """Each step of a ring all-reduce between four ranks."""
    drawing = Drawing(
        "A ring all-reduce between four ranks: chunks are added on their way round, and sums sent round once more",
        "Simulated, step by step.",
    )
    drawing.text(MARGIN, MARGIN + 14, "Ring all-reduce: which ranks' gradients are in each chunk", "title")
    states = ring_states(RANKS)
    cell, row, x, y = 42.0, 22.0, MARGIN + 46, 62.0
    for step, state in enumerate(states):
        if step == RANKS:
            x, y = MARGIN + 46, y + RANKS * row + 50
        head = "before" if step == 0 else f"step {step}: {'add' if step < RANKS else 'replace'}"
        drawing.text(x, y - 6, head, "small")
        for rank, chunks in enumerate(state):
            if x == MARGIN + 46:
                drawing.text(MARGIN, y + row * rank + 15, f"rank {rank}", "small muted")
            for number, ranks in enumerate(chunks):
                color = "green" if len(ranks) == RANKS else "blue" if len(ranks) > 1 else "gray"
                text = "".join(map(str, sorted(ranks)))
                drawing.named_box(x + cell * number, y + row * rank, cell, row, text, color)
        x += cell * RANKS + 24
    y += RANKS * row + 24
    drawing.key(MARGIN, y, {"gray": "its own", "blue": "partial sums", "green": "the sum of all"})
    text = f"Each rank sends {2 * (RANKS - 1)} chunks of 1/{RANKS} of the gradients: 2 (N-1)/N of them, whatever N is."
    drawing.text(MARGIN, y + 24, text, "small muted")
    return drawing


HELD = {
    # name -> moment -> share of parameters, gradients, optimizer state on a rank; 1 is whole, 0 is nothing
    "ddp_custom": ((1, 0, 1), (1, 1, 1)),
    "zero1_custom": ((1, 0, 1 / RANKS), (1, 1, 1 / RANKS)),
    "zero2_custom": ((1 / RANKS, 0, 1 / RANKS), (1, 1 / RANKS, 1 / RANKS)),
    "fsdp_custom": ((1 / RANKS, 0, 1 / RANKS), (1 / RANKS, 1 / RANKS, 1 / RANKS)),
}
STAGES = {"ddp_custom": "DDP", "zero1_custom": "ZeRO-1", "zero2_custom": "ZeRO-2", "fsdp_custom": "ZeRO-3, FSDP2"}


def draw_zero() -> Drawing:
    """The shares of four ranks under DDP and the three stages of ZeRO."""
    drawing = Drawing(
        "Parameters, gradients and optimizer state of four ranks under DDP and the three stages of ZeRO",
        "A drawing of the concept, with the names of the package.",
    )
    drawing.text(
        MARGIN, MARGIN + 14, "What each of four ranks has of parameters (P), gradients (G), state (O)", "title"
    )
    cell, height, left, y = 26.0, 44.0, 180.0, 76.0
    column = RANKS * (3 * cell + 12) + 30
    drawing.text(left, y - 16, "between steps", "label bold")
    drawing.text(left + column, y - 16, "in a step", "label bold")
    for name, moments in HELD.items():
        drawing.text(MARGIN, y + 20, name, "label")
        drawing.text(MARGIN, y + 36, STAGES[name], "small muted")
        for moment, shares in enumerate(moments):
            for rank in range(RANKS):
                x = left + moment * column + rank * (3 * cell + 12)
                for kind, (share, color) in enumerate(zip(shares, ("blue", "orange", "green"), strict=True)):
                    place = x + kind * cell
                    drawing.box(place, y, cell - 2, height, "gray", dashed=True)
                    if share:
                        part = height * share
                        drawing.box(place, y + (rank * part if share < 1 else 0), cell - 2, part, color)
                    drawing.text(place + cell / 2 - 1, y + height + 12, "PGO"[kind], "tiny muted", anchor="middle")
        y += height + 32
    notes = (
        "In a step, zero2_custom has a layer's parameters whole from its forward to its backward, which frees them;",
        "fsdp_custom has one layer whole at a time, or two while the next one is gathered.",
    )
    for number, note in enumerate(notes):
        drawing.text(MARGIN, y + 4 + 16 * number, note, "small muted")
    return drawing


def draw_unit() -> Drawing:
    """One unit of sharding through a step, on two ranks."""
    drawing = Drawing(
        "A layer under fsdp_custom on two ranks: gather, forward, free, gather, backward, reduce-scatter",
        "A drawing of the concept.",
    )
    drawing.text(MARGIN, MARGIN + 14, "A layer through a step under fsdp_custom, two ranks", "title")
    steps = (
        ("shard\n1/2", "blue"),
        ("whole\nparameters", "yellow"),
        ("forward\nown samples", "purple"),
        ("shard\n1/2", "blue"),
        ("whole\nparameters", "yellow"),
        ("backward\nown gradients", "orange"),
        ("1/2 of the\nmean", "green"),
    )
    between = {0: "all-gather", 2: "free", 3: "all-gather", 5: "reduce-scatter"}
    width, gap, y = 92.0, 30.0, 66.0
    for rank in range(2):
        top = y + rank * 74
        drawing.text(MARGIN, top + 26, f"rank {rank}", "small muted")
        for number, (text, color) in enumerate(steps):
            x = MARGIN + 50 + number * (width + gap)
            drawing.named_box(x, top, width, 46, text, color)
            if number < len(steps) - 1:
                drawing.arrow((x + width, top + 23), (x + width + gap, top + 23))
    for number, word in between.items():
        x = MARGIN + 50 + number * (width + gap) + width + gap / 2
        drawing.line((x, y - 8), (x, y + 136), kind="thin")
        drawing.text(x, y + 152, word, "small", anchor="middle")
    text = "zero2_custom leaves out the freeing and the second gather. The optimizer updates each rank's shard."
    drawing.text(MARGIN, y + 182, text, "small muted")
    return drawing


def draw_window() -> Drawing:
    """A window of four microsteps under three rules of reduction."""
    drawing = Drawing(
        "When gradients are reduced within a window of four microsteps",
        "A drawing of the concept.",
    )
    drawing.text(MARGIN, MARGIN + 14, "accumulate_grad_batches=4: when gradients are reduced", "title")
    rows = (
        ("ddp_custom, zero1_custom", (0, 0, 0, 1), "whole gradients, in any case"),
        ("fsdp_custom, accumulation_sync=every", (1, 1, 1, 1), "shards of gradients"),
        ("fsdp_custom, accumulation_sync=last", (0, 0, 0, 1), "whole gradients until the last microstep"),
    )
    y = 58.0
    for name, reduces, memory in rows:
        drawing.text(MARGIN, y, name, "label")
        y += 10
        x = MARGIN
        for microstep, is_reduced in enumerate(reduces):
            for word, color, width in (("forward", "blue", 58.0), ("backward", "orange", 74.0)):
                drawing.named_box(x, y, width, 26, word, color, "tiny")
                x += width
            if is_reduced:
                drawing.named_box(x, y, 44, 26, "reduce", "green", "tiny")
                x += 44
            x += 8
            if microstep == len(reduces) - 1:
                drawing.named_box(x, y, 54, 26, "update", "purple", "tiny")
        drawing.text(MARGIN, y + 42, f"kept between microsteps: {memory}", "small muted")
        y += 72
    return drawing
