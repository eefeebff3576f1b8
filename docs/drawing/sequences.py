"""Concepts of context parallelism: positions for heads (Ulysses), and keys and values in a ring."""

from __future__ import annotations

import torch

from drawing.svg import MARGIN, Drawing
from lightning_parallel.techniques.context.sequences import _folded as folded

RANKS = 4
COLORS = ("blue", "orange", "green", "purple")


def draw_ulysses() -> Drawing:
    """Who has which positions and heads before, during and behind attention."""
    drawing = Drawing(
        "Ulysses: around attention, four ranks exchange positions for heads",
        "A drawing of the concept.",
    )
    drawing.text(MARGIN, MARGIN + 14, "Ulysses: eight positions, eight heads, four ranks", "title")
    cell, y = 18.0, 84.0
    panels = ("in the layer: 2 positions each", "in attention: 2 heads each", "behind it: 2 positions each")
    for number, head in enumerate(panels):
        x = MARGIN + 40 + number * (8 * cell + 128)
        drawing.text(x + 4 * cell, y - 28, head, "small", anchor="middle")
        drawing.text(x + 4 * cell, y - 8, "positions", "tiny muted", anchor="middle")
        drawing.text(x - 8, y + 4 * cell, "heads", "tiny muted", anchor="middle", turned=True)
        for position in range(8):
            for which in range(8):
                owner = (which if number == 1 else position) // 2
                drawing.box(x + cell * position, y + cell * which, cell, cell, COLORS[owner])
        if number < len(panels) - 1:
            end = x + 8 * cell
            drawing.arrow((end + 10, y + 4 * cell), (end + 98, y + 4 * cell))
            drawing.text(end + 54, y + 4 * cell - 8, "all-to-all", "small", anchor="middle")
    y += 8 * cell + 28
    drawing.key(MARGIN + 40, y, {color: f"rank {rank}" for rank, color in enumerate(COLORS)})
    text = "Queries, keys and values are exchanged there, results on the way back: four all-to-alls a layer in forward."
    drawing.text(MARGIN, y + 26, text, "small muted")
    return drawing


def draw_ring_attention() -> Drawing:
    """The pieces of a sequence that each rank has, and whose keys it meets in which step."""
    drawing = Drawing(
        "Ring attention: keys and values go from rank to rank, queries stay",
        "Pieces are those of lightning_parallel.techniques.context.sequences.folded.",
    )
    drawing.text(MARGIN, MARGIN + 14, "Ring attention on four ranks", "title")
    order = folded(torch.arange(2 * RANKS), 0, RANKS).tolist()
    cell, y = 46.0, 76.0
    drawing.text(MARGIN, y - 14, "a sequence in eight pieces, by rank", "label")
    for place in range(2 * RANKS):
        owner = order.index(place) // 2
        drawing.named_box(MARGIN + cell * place, y, cell, 26, f"rank {owner}", COLORS[owner], "tiny")
    y += 66
    drawing.text(MARGIN, y - 14, "whose keys and values a rank's queries meet", "label")
    for step in range(RANKS):
        x = MARGIN + 60 + step * 104
        drawing.text(x + 43, y + 6, f"step {step + 1}", "small muted", anchor="middle")
        for rank in range(RANKS):
            source = (rank - step) % RANKS
            pieces = " and ".join(str(piece) for piece in order[2 * source : 2 * source + 2])
            drawing.named_box(x, y + 14 + 28 * rank, 86, 24, f"pieces {pieces}", COLORS[source], "tiny")
    for rank in range(RANKS):
        drawing.text(MARGIN, y + 30 + 28 * rank, f"rank {rank}", "small muted")
    y += 14 + 28 * RANKS + 18
    drawing.text(
        MARGIN,
        y,
        f"Keys and values are sent {RANKS - 1} times. The two pieces of a rank are as far from the two ends,",
        "small muted",
    )
    drawing.text(MARGIN, y + 16, "so under a causal mask all ranks have the same work.", "small muted")
    return drawing
