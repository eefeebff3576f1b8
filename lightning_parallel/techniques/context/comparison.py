"""What is said where a layer on parts of sequences differs from itself on whole ones. Layer 2."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel import _torch

_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
_TOLERANCE_OF_HALF = 5e-2
ELSEWHERE = "context parallel changes what another rank computes, which says more; give context=1"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


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
    start = f"context parallel changes what {path} ({_torch.fsdp.class_name(layer)}) computes"
    if ours.shape != whole.shape:
        return f"{start}: {tuple(ours.shape)} in place of {tuple(whole.shape)}; give context=1"
    allowed = _allowed(whole)
    errors = _errors(ours, whole)
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


def further_violations(path: str, layer: nn.Module, ours: Any, whole: Any) -> list[str]:
    """Why what the layer returns beside hidden states cannot be what a part computes; empty if it can."""
    pairs = zip(_further(ours), _further(whole), strict=True)
    shapes = [w.shape for o, w in pairs if o.shape != w.shape or float(_errors(o, w).max()) > _allowed(w)]
    if not shapes:
        return []
    return [
        f"{path} ({_torch.fsdp.class_name(layer)}) returns a tensor {tuple(shapes[0])} beside hidden states, which a "
        "rank computes from its part of the sequence, and which nobody joins; leave it out, such as the loss that "
        "balances experts, or give context=1"
    ]


def _further(output: Any) -> list[Tensor]:
    leaves = tree_leaves(output[1:]) if isinstance(output, tuple) else []
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()]


def _allowed(whole: Tensor) -> float:
    largest = whole.abs().nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1e-6)
    return _TOLERANCE.get(whole.dtype, _TOLERANCE_OF_HALF) * float(largest)


def _errors(ours: Tensor, whole: Tensor) -> Tensor:
    """How far they differ where there are numbers: a batch may be one that training goes on after."""
    errors = (ours - whole).abs().float().nan_to_num(torch.inf, torch.inf)
    return torch.where(whole.isfinite(), errors, 0.0)


def batch_statistics_violations(path: str, layer: nn.Module) -> list[str]:
    """Why the layer cannot be trained on parts of sequences; empty if it can."""
    names = [n for n, c in layer.named_modules() if isinstance(c, _BATCH_NORMS) and c.training]
    return [
        f"{path}.{name} takes statistics of all positions, of which a rank has a part; freeze them (eval()), use a "
        "norm without statistics, or give context=1"
        for name in names[:1]
    ]


def failed(path: str, layer: nn.Module, error: Exception, *, has_attention: bool) -> str:
    """In words, that the layer fails on a part."""
    if not has_attention:
        return f"{bypassed(path, layer)}. On a part of a sequence it fails with: {error}"
    return (
        f"{path} ({_torch.fsdp.class_name(layer)}) fails on a part of the sequence: {error}. Shapes, masks or "
        "positions that it makes by itself are those of whole sequences; give context=1"
    )


def counted_otherwise(path: str, layer: nn.Module) -> str:
    """In words, that the layer does not count positions as it did when it was compared."""
    return (
        f"{path} ({_torch.fsdp.class_name(layer)}) counts positions by torch.arange in some steps, and in others goes "
        "by what it has kept; a part has other positions in each length. Give it positions as an argument, or context=1"
    )


def bypassed(path: str, layer: nn.Module) -> str:
    """In words, that the layer has no attention that ranks could share."""
    return (
        f"{path} ({_torch.fsdp.class_name(layer)}) does not call torch's scaled_dot_product_attention, which is what "
        "ranks share under context parallel; for Hugging Face models give attn_implementation='sdpa', for "
        "nn.MultiheadAttention need_weights=False, or give context=1"
    )
