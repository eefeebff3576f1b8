"""Bytes of parameters, gradients and optimizer state over numbers of ranks: arithmetic only."""

from __future__ import annotations

from drawing.svg import MARGIN, Drawing
from lightning_parallel import Degrees

BYTES = {"fp32 or mixed": 16, "bf16-true": 8}
"""Precision -> bytes of a parameter, its gradient and two moments of AdamW."""
SIZES = {"0.1 B": 1e8, "1 B": 1e9, "7 B": 7e9, "13 B": 1.3e10, "70 B": 7e10}
RANKS = (1, 8, 16, 64, 256)
DEVICE = 80e9
"""Bytes of a device's memory."""
_HALF, _MOST = 0.5, 0.9
"""Shares of a device: up to the first, half of it is left for activations; above the second, nothing is."""


def state_of_rank(parameters: float, ranks: int, bytes_each: int) -> float:
    """Bytes that a rank holds of parameters, gradients and state, if all of them are sharded over all ranks."""
    return parameters * bytes_each / Degrees().resolve(ranks).data


def draw_sizes() -> Drawing:
    """What a rank holds under `fsdp_custom`, for models of several sizes on several numbers of ranks."""
    drawing = Drawing(
        "GB of parameters, gradients and state of AdamW on a rank under fsdp_custom, by model size and number of ranks",
        "Computed: 16 bytes a parameter in fp32 and in mixed precision, 8 in bf16-true, divided by the ranks.",
    )
    drawing.text(MARGIN, MARGIN + 14, "GB of parameters, gradients and state on a rank (fsdp_custom, AdamW)", "title")
    cell, row, left, y = 78.0, 30.0, 110.0, 64.0
    for precision, bytes_each in BYTES.items():
        drawing.text(MARGIN, y, f"precision: {precision}, {bytes_each} bytes a parameter", "label")
        y += 24
        for number, ranks in enumerate(RANKS):
            label = f"{ranks} ranks" if ranks > 1 else "1 rank"
            drawing.text(left + cell * (number + 0.5), y - 6, label, "small muted", anchor="middle")
        for name, parameters in SIZES.items():
            drawing.text(MARGIN, y + 19, name, "label")
            for number, ranks in enumerate(RANKS):
                size = state_of_rank(parameters, ranks, bytes_each)
                color = "green" if size <= _HALF * DEVICE else "yellow" if size <= _MOST * DEVICE else "red"
                text = f"{size / 1e9:.0f}" if size >= 1e10 else f"{size / 1e9:.2g}"
                drawing.named_box(left + cell * number, y, cell - 4, row - 4, text, color)
            y += row
        y += 30
    entries = {"green": "at most half of 80 GB", "yellow": "at most nine tenths", "red": "more"}
    drawing.key(MARGIN, y, entries)
    drawing.text(
        MARGIN, y + 24, "Activations, the layer that is gathered and what libraries take come on top.", "small muted"
    )
    return drawing
