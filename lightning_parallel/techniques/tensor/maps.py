"""Linear maps whose weights are split over ranks, by columns or by rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from lightning_parallel import _torch
from lightning_parallel.module.layer_run import ROUNDING
from lightning_parallel.ranks.dtensors import full_of, local_of
from lightning_parallel.techniques.tensor.attention import attend_multihead
from lightning_parallel.techniques.tensor.linear_maps import is_transposed
from lightning_parallel.techniques.tensor.parameters import split_parameters
from lightning_parallel.techniques.tensor.split_layer import Product, SplitLayer


class Products(Protocol):
    """Chooses how the parts of a map multiply."""

    def __call__(self, linear: nn.Module, *, by_columns: bool) -> Product | None:
        """The product that takes the place of `F.linear` while the map says that it rounds; ``None`` if it stays."""


def split_maps(
    layer: nn.Module,
    roles: dict[str, str],
    split: SplitLayer,
    parameters: dict[nn.Parameter, nn.Parameter],
    *,
    products: Products | None = None,
) -> None:
    """Split the linear maps of a layer, in place.

    Args:
        layer: The layer.
        roles: Path of a map in the layer -> its role.
        split: The layer's state, which says how maps run.
        parameters: Parameter -> its replacement so far; grows, so that a parameter of several maps is split once.
        products: Says how their parts multiply; as `nn.Linear` does, if left out.
    """
    distribute = functools.partial(split_parameters, mesh=split.flow.mesh, known=parameters)
    run: Callable[..., Any]
    chosen: tuple[Product | None, ...]
    for name, role in roles.items():
        linear = layer.get_submodule(name)
        if role == "heads":
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
            distribute(linear, dict.fromkeys(names, 0))
            distribute(cast(nn.Module, linear.out_proj), {"weight": 1})
            run, chosen = _attending, ()
        else:
            product = None if products is None else products(linear, by_columns=role == "colwise")
            dims = {"weight": int((role == "colwise") == is_transposed(linear))}
            distribute(linear, {**dims, "bias": 0} if role == "colwise" else dims)
            run, chosen = _by_columns if role == "colwise" else _by_rows, (product,)
        forward = functools.partialmethod(run, split, type(linear), *chosen)
        linear.__class__ = _torch.modules.subclass_like(type(linear), forward)


def _by_columns(self: Any, split: SplitLayer, cls: type[Any], product: Product | None, states: Tensor) -> Any:
    if split.is_unsplit(self.weight):
        return cls.forward(self, states)
    states = split.region.column_input(full_of(states))
    bias = None if self.bias is None else local_of(self.bias)
    if product is None or not vars(self).get(ROUNDING):
        return split.flow.as_part(F.linear(states, _weight(self), bias))
    result = product(states, _weight(self))
    return split.flow.as_part(result if bias is None else result + bias.to(result.dtype))


def _by_rows(self: Any, split: SplitLayer, cls: type[Any], product: Product | None, states: Tensor) -> Any:
    if split.is_unsplit(self.weight):
        return cls.forward(self, states)
    weight = _weight(self)
    if isinstance(states, DTensor):
        states = states.redistribute(placements=[Shard(states.ndim - 1)]).to_local()
    elif states.shape[-1] != weight.shape[1]:
        states = split.region.row_input(states)
    # The bias is added after the sum over ranks, which would count it once for each rank.
    multiply = F.linear if product is None or not vars(self).get(ROUNDING) else product
    result = split.region.row_output(multiply(states, weight))
    return result if self.bias is None else result + self.bias.to(result.dtype)


def _weight(linear: Any) -> Tensor:
    """This rank's part, `[outputs, inputs]`."""
    weight: Tensor = linear.weight.to_local()
    return weight.t() if is_transposed(linear) else weight


def _attending(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    if split.is_unsplit(self.out_proj.weight):
        return cls.forward(self, *args, **kwargs)
    return attend_multihead(self, split.region, *args, **kwargs)
