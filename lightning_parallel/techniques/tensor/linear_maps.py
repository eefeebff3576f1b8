"""The linear maps of a layer: modules of which tensor parallelism knows what they compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.module.dry_run import side_effects_undone
from lightning_parallel.ranks.random_streams import unchanged_generators

_HOST = torch.device("cpu")
_SCALES = (1.0, 100.0)
"""Sizes of the numbers with which a forward is tried: one that clamps or saturates differs at one of them."""


def is_transposed(linear: nn.Module) -> bool:
    """Whether the weight is `[inputs, outputs]`, as in Hugging Face's `Conv1D`."""
    return type(linear).__name__ == "Conv1D" and hasattr(linear, "nf")


def linear_maps(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """List the linear maps of `layer` by path in it, with each `nn.MultiheadAttention` as one.

    A subclass of `nn.Linear` with a forward of its own is one if it computes the same.
    """
    inside: list[str] = []
    for path, child in layer.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(child, nn.MultiheadAttention):
            inside.append(path)
            # Not split: attention with learned extra keys and values, or with weights that are computed.
            if child.bias_k is None and not child.add_zero_attn and "weight" in child.out_proj._parameters:
                yield path, child
        elif _is_map(child):
            yield path, child


def unlike_linear(layer: nn.Module) -> dict[str, str]:
    """Map the paths of modules that look like linear maps, and stay whole, to the reason.

    Args:
        layer: Any module.
    """
    return {
        path: f"is a {type(child).__name__}, which computes something else than nn.Linear"
        for path, child in layer.named_modules()
        if isinstance(child, nn.Linear) and hasattr(child, "weight") and not _is_map(child)
    }


def shape_of(linear: nn.Module) -> tuple[int, ...]:
    """The shape of a map's weight, or the width of an `nn.MultiheadAttention`."""
    map_of: Any = linear
    return tuple(map_of.weight.shape) if hasattr(linear, "weight") else (map_of.embed_dim,)


def _is_map(child: nn.Module) -> bool:
    if "weight" not in child._parameters:
        return False
    if getattr(type(child), "forward", None) is nn.Linear.forward or is_transposed(child):
        return True
    return isinstance(child, nn.Linear) and _computes_the_same(child)


def _computes_the_same(linear: nn.Linear) -> bool:
    """Whether a small copy of `linear` with other numbers returns what `nn.Linear` does, with the same gradients.

    What it holds beside weight and bias, and what it does at random or in one mode only, makes it another map.
    """
    if linear._buffers or linear._modules or not set(linear._parameters) <= {"weight", "bias"}:
        return False
    try:
        with torch.enable_grad(), _HOST, unchanged_generators(_HOST), side_effects_undone(linear):
            return all(_is_equal(linear, scale, training) for scale in _SCALES for training in (True, False))
    except Exception:  # it may need anything, such as weights of its own size
        return False


def _is_equal(linear: nn.Linear, scale: float, training: bool) -> bool:
    small: Any = copy.copy(linear)
    states, weight, bias = (_wave(*shape).mul(scale).requires_grad_() for shape in ((2, 3, 5), (4, 5), (4,)))
    parameters = {"weight": nn.Parameter(weight.detach().clone())}
    parameters["bias"] = None if linear.bias is None else nn.Parameter(bias.detach().clone())  # type: ignore[assignment]
    vars(small).update(in_features=5, out_features=4, training=training, _parameters=parameters)
    ours, inputs = small.forward(states), [states, *(p for p in parameters.values() if p is not None)]
    theirs = F.linear(states, weight, None if linear.bias is None else bias)
    found = [ours, *torch.autograd.grad(ours, inputs, _wave(*theirs.shape))]
    wanted = [theirs, *torch.autograd.grad(theirs, [states, weight, bias][: len(inputs)], _wave(*theirs.shape))]
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6 * scale**2)
        for one, other in zip(found, wanted, strict=True)
    )


def _wave(*shape: int) -> Tensor:
    """Numbers of both signs, without drawing any."""
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).sin().view(shape)
