"""Linear maps whose weights are split over ranks, by columns or by rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel import _torch
from lightning_parallel.ranks.dtensors import full_of, local_of
from lightning_parallel.techniques.tensor.attention import attend_multihead
from lightning_parallel.techniques.tensor.linear_maps import is_transposed
from lightning_parallel.techniques.tensor.parameters import split_parameters
from lightning_parallel.techniques.tensor.split_layer import SplitLayer


def split_maps(
    layer: nn.Module, roles: dict[str, str], split: SplitLayer, parameters: dict[nn.Parameter, nn.Parameter]
) -> None:
    """Split the linear maps of a layer, in place.

    Args:
        layer: The layer.
        roles: Path of a map in the layer -> its role.
        split: The layer's state, which says how maps run.
        parameters: Parameter -> its replacement so far; grows, so that a parameter of several maps is split once.
    """
    distribute = functools.partial(split_parameters, mesh=split.flow.mesh, known=parameters)
    for name, role in roles.items():
        linear = layer.get_submodule(name)
        if role == "heads":
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
            distribute(linear, dict.fromkeys(names, 0))
            distribute(cast(nn.Module, linear.out_proj), {"weight": 1})
            run: Callable[..., Any] = _attending
        else:
            dims = {"weight": int((role == "colwise") == is_transposed(linear))}
            distribute(linear, {**dims, "bias": 0} if role == "colwise" else dims)
            run = _by_columns if role == "colwise" else _by_rows
        linear.__class__ = _torch.modules.subclass_like(type(linear), functools.partialmethod(run, split, type(linear)))


def _by_columns(self: Any, split: SplitLayer, cls: type[Any], states: Tensor) -> Any:
    if split.is_unsplit(self.weight):
        return cls.forward(self, states)
    bias = None if self.bias is None else local_of(self.bias)
    return split.flow.as_part(_product(self, split.region.column_input(full_of(states)), bias))


def _by_rows(self: Any, split: SplitLayer, cls: type[Any], states: Tensor) -> Any:
    if split.is_unsplit(self.weight):
        return cls.forward(self, states)
    if isinstance(states, DTensor):
        states = states.redistribute(placements=[Shard(states.ndim - 1)]).to_local()
    elif states.shape[-1] != self.weight.to_local().shape[0 if is_transposed(self) else 1]:
        states = split.region.row_input(states)
    # The bias is added after the sum over ranks, which would count it once for each rank.
    result = split.region.row_output(_product(self, states, None))
    return result if self.bias is None else result + self.bias.to(result.dtype)


def _product(linear: Any, states: Tensor, bias: Tensor | None) -> Tensor:
    weight = linear.weight.to_local()
    return F.linear(states, weight.t() if is_transposed(linear) else weight, bias)


def _attending(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if split.is_unsplit(self.out_proj.weight):
        return cls.forward(self, *args, **kwargs)
    return attend_multihead(self, split.region, *args, **kwargs)
