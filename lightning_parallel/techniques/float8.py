"""Compute the linear layers of the stack in float8, scaled dynamically.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning"; torchao's `float8` (the extra ``float8``).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.module.layer_run import ROUNDING

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
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    config = _config(float8)
    rounding = _torch.modules.subclass_like(Float8Linear, functools.partialmethod(_multiplied, Float8Linear))
    fitting = {linear for linear in _linears(layers) if _fits(linear)}
    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=lambda child, _: child in fitting)
        for child in layer.modules():
            if isinstance(child, Float8Linear) and child.config is config:
                child.__class__ = rounding
                setattr(child, ROUNDING, True)


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


def _multiplied(self: Any, cls: type[Any], states: Tensor) -> Tensor:
    product: Tensor = (cls if getattr(self, ROUNDING) else nn.Linear).forward(self, states)
    return product


def _config(float8: str) -> Any:
    from torchao.float8 import Float8LinearConfig

    recipe, emulates = _parse(float8)
    return dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulates)


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


class PartProducts:
    """Products in float8 of linear maps of which each rank holds a part, scaled as those of whole maps.

    A scale is that of the largest element on any of the ranks: they agree on it in one small all-reduce in forward, and
    one in backward, if it is of elements that they share. So each element is rounded as on one device.

    Args:
        float8: A recipe that `float8_violations` accepts.
        group: The ranks that share a map.

    Example:
        >>> product = PartProducts("tensorwise", group).of(linear, by_columns=True)
        >>> product(states, part_of_weight)
    """

    def __init__(self, float8: str, group: ProcessGroup) -> None:
        self._float8, self._group = float8, group

    def of(self, linear: nn.Module, *, by_columns: bool) -> Callable[[Tensor, Tensor], Tensor] | None:
        """The product that takes the place of `torch.nn.functional.linear`; ``None`` if it stays.

        Args:
            linear: The map, with the sizes of the whole.
            by_columns: Whether ranks have some of its outputs each, or some of its inputs.

        Returns:
            From `[..., inputs]` and a weight `[outputs, inputs]`, of this rank's part, to `[..., outputs]`.
        """
        if type(linear) is not nn.Linear or not _fits(linear):
            return None
        setattr(linear, ROUNDING, True)
        return PartProduct(_config(self._float8), self._group, by_columns=by_columns)


class PartProduct:
    """Product in float8 of one linear map of which each rank holds a part.

    Args:
        config: Of torchao.
        group: The ranks that share the map.
        by_columns: Whether they have some of its outputs each, or some of its inputs.
    """

    def __init__(self, config: Any, group: ProcessGroup, *, by_columns: bool) -> None:
        from torchao.float8 import convert_to_float8_training

        self.config, self._group = config, group
        # Dimensions of operands that are divided over the ranks, of matrices `[tokens, inputs]`, `[inputs, outputs]`
        # and `[tokens, outputs]`.
        self._inputs: int | None
        self._gradient: int | None
        self._inputs, self._gradient = (None, -1) if by_columns else (-1, None)
        self._weight = -1 if by_columns else 0
        with torch.device("meta"):
            self._products = convert_to_float8_training(nn.Linear(_MULTIPLE, _MULTIPLE), config=config).linear_mm_config

    # Not compiled: ranks meet in the middle of it.
    @_torch.modes.not_compiled
    def __call__(self, states: Tensor, weight: Tensor) -> Tensor:
        """As `torch.nn.functional.linear` without a bias."""
        if torch.is_autocast_enabled("cuda"):  # as torchao's linear maps do, in which others compute
            states = states.to(torch.get_autocast_dtype("cuda"))
        inputs, outputs = (-(-size // _MULTIPLE) * _MULTIPLE - size for size in (weight.shape[1], weight.shape[0]))
        # The hardware takes multiples only, and a part may be none. Zeros change neither scales nor results.
        padded = F.pad(states.reshape(-1, states.shape[-1]), (0, inputs))
        product: Tensor = _Scaled.apply(padded, F.pad(weight, (0, inputs, 0, outputs)), self)
        return product[:, : weight.shape[0]].reshape(*states.shape[:-1], weight.shape[0])

    def output(self, states: Tensor, weight: Tensor) -> Tensor:
        """Compute `[tokens, outputs]` of `[tokens, inputs]` and `[outputs, inputs]`. A collective."""
        config = self.config
        ours, others = self._cast(
            _Operand("INPUT", states, config.cast_config_input, dim=-1, divided=self._inputs),
            _Operand("WEIGHT", weight.t(), config.cast_config_weight, dim=0, divided=self._weight),
        )
        return torch.mm(ours, others)

    def gradients(self, states: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the gradients of both operands of `output`. A collective.

        Args:
            states: `[tokens, inputs]`.
            weight: `[outputs, inputs]`.
            gradient: Of the output, `[tokens, outputs]`.
        """
        config, divided = self.config, self._gradient
        for_states, by_weight, for_weight, by_states = self._cast(
            _Operand("GRAD_OUTPUT", gradient, config.cast_config_grad_output, dim=-1, divided=divided),
            _Operand("WEIGHT", weight.t(), config.cast_config_weight_for_grad_input, dim=-1, divided=self._weight),
            _Operand("GRAD_OUTPUT", gradient, config.cast_config_grad_output_for_grad_weight, dim=0, divided=divided),
            _Operand("INPUT", states, config.cast_config_input_for_grad_weight, dim=0, divided=self._inputs),
        )
        return torch.mm(for_states, by_weight.t()), torch.mm(for_weight.t(), by_states)

    def _cast(self, *operands: _Operand) -> list[Any]:
        """The operands in float8."""
        from torchao.float8.float8_training_tensor import GemmInputRole, hp_tensor_and_scale_to_float8
        from torchao.float8.float8_utils import amax_to_scale

        largest = self._largest_of_all(operands)
        round_down = self.config.round_scales_to_power_of_2
        return [
            hp_tensor_and_scale_to_float8(
                each.matrix,
                amax_to_scale(amax, each.cast.target_dtype, round_scales_to_power_of_2=round_down),
                each.cast.target_dtype,
                self._products,
                GemmInputRole[each.role],
                each.scaled_dim,
            )
            for each, amax in zip(operands, largest, strict=True)
        ]

    def _largest_of_all(self, operands: Sequence[_Operand]) -> list[Tensor]:
        """The largest elements of each, on any of the ranks."""
        largest = [operand.largest() for operand in operands]
        indices = [index for index, operand in enumerate(operands) if operand.is_shared]
        if not indices:
            return largest
        together = torch.cat([largest[index].flatten() for index in indices])
        dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self._group)
        for index, part in zip(indices, together.split([largest[i].numel() for i in indices]), strict=True):
            largest[index] = part.view(largest[index].shape)
        return largest


@dataclass(frozen=True)
class _Operand:
    """One of the two matrices of a product.

    Args:
        role: By torchao's name.
        matrix: This rank's part.
        cast: How torchao scales it.
        dim: The dimension over which it is summed, and along which a row with a scale of its own extends.
        divided: The dimension of which each rank has a part, if there is one.
    """

    role: str
    matrix: Tensor
    cast: Any
    dim: int
    divided: int | None

    @property
    def scaled_dim(self) -> int | None:
        """`dim`, if each row has a scale of its own."""
        return self.dim if self.cast.scaling_granularity.value == "axiswise" else None

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have elements of the same scale."""
        return self.divided is not None and self.scaled_dim in (None, self.divided)

    def largest(self) -> Tensor:
        """The largest of this rank's elements for each scale."""
        dim = self.scaled_dim
        return self.matrix.abs().amax(dim=() if dim is None else dim, keepdim=dim is not None).double()


class _Scaled(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, states: Tensor, weight: Tensor, product: PartProduct) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.product = product
        return product.output(states, weight)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *ctx.product.gradients(*ctx.saved_tensors, gradients[0]), None
