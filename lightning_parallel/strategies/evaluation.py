"""Evaluation without gradients, but not under `inference_mode`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


@contextmanager
def inference_mode_left(trainer: Trainer) -> Iterator[None]:
    """Let the loops of `trainer` evaluate under `no_grad` here.

    FSDP2 allocates its gathered parameters in the first forward. Made under `inference_mode` they are inference tensors
    for good, and break that forward and the next training step. Lightning falls back to `no_grad` on gloo only.
    """
    loops: tuple[Any, ...] = (trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    modes = [loop.inference_mode for loop in loops]
    for loop in loops:
        loop.inference_mode = False
    try:
        yield
    finally:
        for loop, mode in zip(loops, modes, strict=True):
            loop.inference_mode = mode
