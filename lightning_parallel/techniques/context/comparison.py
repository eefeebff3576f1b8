"""What is said where a layer on parts of sequences differs from itself on whole ones. Layer 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_parallel import _torch

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_HALF = 5e-2


def sequence_dims(layer: nn.Module) -> list[int]:
    """Which dimension of hidden states may be the sequence, the likelier one first."""
    is_batch_first = all(c.batch_first for c in layer.modules() if isinstance(c, nn.MultiheadAttention))
    return [1, 0] if is_batch_first else [0, 1]


def first_of(output: Any) -> Tensor:
    """What goes on to the next layer."""
    first: Tensor = output[0] if isinstance(output, tuple) else output
    return first


def difference(path: str, layer: nn.Module, ours: Tensor, whole: Tensor, dim: int) -> str:
    """In words, where the split layer differs from the whole one; empty if it does not."""
    start = f"context parallel changes what {path} ({_torch.class_name(layer)}) computes"
    if ours.shape != whole.shape:
        return f"{start}: {tuple(ours.shape)} in place of {tuple(whole.shape)}; give context=1"
    allowed = _TOLERANCE.get(whole.dtype, _TOLERANCE_OF_HALF) * float(whole.abs().max().clamp(min=1e-6))
    errors = (ours - whole).abs().float()
    if float(errors.max()) <= allowed:
        return ""
    positions = errors.amax([d for d in range(errors.ndim) if d != dim])
    begin = int((positions > allowed).nonzero()[0])
    return (
        f"{start}: by {float(errors.max()):.2g} where {allowed:.2g} is allowed, from position {begin} of "
        f"{len(positions)} on. A layer that makes positions by itself, or mixes positions outside of "
        "scaled_dot_product_attention, cannot work on a part of the sequence; give it positions as an argument, or "
        "give context=1"
    )


def failed(path: str, layer: nn.Module, error: Exception) -> str:
    """In words, that the layer fails on a part."""
    return (
        f"{path} ({_torch.class_name(layer)}) fails on a part of the sequence: {error}. Shapes, masks or positions "
        "that it makes by itself are those of whole sequences; give context=1"
    )


def bypassed(path: str, layer: nn.Module) -> str:
    """In words, that the layer has no attention that ranks could share."""
    return (
        f"{path} ({_torch.class_name(layer)}) does not call torch's scaled_dot_product_attention, which is what "
        "ranks share under context parallel; for Hugging Face models give attn_implementation='sdpa', for "
        "nn.MultiheadAttention need_weights=False, or give context=1"
    )
