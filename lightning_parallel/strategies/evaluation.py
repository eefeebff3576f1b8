"""Evaluate without gradients, but not under `inference_mode`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def leave_inference_mode(trainer: Trainer) -> list[tuple[Any, bool]]:
    """Let the loops of `trainer` evaluate under `no_grad`; returns each loop with what it was set to.

    FSDP2 allocates its gathered parameters in the first forward. Made under `inference_mode` they are inference tensors
    for good, and break that forward and the next training step. Lightning falls back to `no_grad` on gloo only.
    """
    loops = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    modes = [(loop, loop.inference_mode) for loop in loops]
    for loop in loops:
        loop.inference_mode = False
    return modes
