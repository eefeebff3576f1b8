"""Compute the linear layers of the stack in float8, scaled dynamically.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; torchao's `float8` (the extra ``float8``).
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence

import torch
from torch import nn

RECIPES = ("tensorwise", "rowwise")
"""One scale for each tensor, or one for each row, which is more exact and slower."""
_EMULATE = "emulate"
_MULTIPLE = 16
_CAPABILITY = (8, 9)


def float8_violations(float8: str | None, device: torch.device) -> list[str]:
    """Reasons why `float8` cannot be used on `device`; empty if it can.

    Args:
        float8: ``None``, the name of a recipe, or ``"tensorwise:emulate"``.
        device: This rank's device, or one of the same kind.
    """
    if float8 in (None, "none"):
        return []
    recipe, emulates = _parse(float8)
    found = []
    if recipe not in RECIPES:
        found.append(
            f"float8={float8!r} is unknown; possible: {', '.join(RECIPES)}, and {RECIPES[0]}:{_EMULATE} without the "
            "hardware, for tests"
        )
    if importlib.util.find_spec("torchao") is None:
        found.append(f"float8={float8!r} needs torchao; install it with: pip install 'lightning_parallel[float8]'")
    if not found and not emulates and (hardware := _missing_hardware(device)):
        found.append(
            f"float8={float8!r} needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or higher, but "
            f"{hardware}; give precision='bf16-mixed', or float8='{recipe}:{_EMULATE}' to try the numbers, slowly"
        )
    return found


def apply_float8(layers: Sequence[nn.Module], float8: str) -> None:
    """Replace the linear maps in `layers` by those that compute in float8, in place. Names and parameters stay.

    Linear maps whose sizes are not multiples of 16 stay as they are, because the hardware does not take them.

    Args:
        layers: The layers of the stacks.
        float8: A recipe that `float8_violations` accepts.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    recipe, emulates = _parse(float8)
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulates)
    fitting = {linear for linear in _linears(layers) if _fits(linear)}
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda child, _: child in fitting)


def unfitting_violations(layers: Sequence[nn.Module], float8: str | None) -> list[str]:
    """Reasons why no linear map of `layers` can compute in float8; empty if one can.

    Args:
        layers: The layers of the stacks.
        float8: As the user wrote it.
    """
    linears = _linears(layers)
    if float8 in (None, "none") or any(_fits(linear) for linear in linears):
        return []
    sizes = sorted({f"{linear.in_features} x {linear.out_features}" for linear in linears})
    return [
        f"float8={float8!r}: the {len(layers)} layers have {len(linears)} linear maps (nn.Linear), none of sizes that "
        f"are multiples of {_MULTIPLE} ({', '.join(sizes) or 'none at all'}); leave float8 out"
    ]


def _linears(layers: Sequence[nn.Module]) -> list[nn.Linear]:
    # Owners of subclasses read their weights directly, as nn.MultiheadAttention does with that of its output map.
    return [child for layer in layers for child in layer.modules() if type(child) is nn.Linear]


def _parse(float8: str | None) -> tuple[str, bool]:
    recipe, _, word = str(float8).partition(":")
    return (recipe, word == _EMULATE) if word in ("", _EMULATE) else (str(float8), False)


def _fits(linear: nn.Linear) -> bool:
    return linear.in_features % _MULTIPLE == 0 and linear.out_features % _MULTIPLE == 0


def _missing_hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"the device is {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) >= _CAPABILITY else f"this one has {major}.{minor}"
