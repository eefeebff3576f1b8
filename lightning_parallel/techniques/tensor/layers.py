"""Split the layers of stacks over the ranks that share a matrix product."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_parallel import _torch
from lightning_parallel.module.hidden_states import Lengths
from lightning_parallel.module.kv_cache import without_fresh_cache
from lightning_parallel.module.layer_kinds import kind_of
from lightning_parallel.module.layer_search import joined_behind_each
from lightning_parallel.techniques.tensor.comparison import check_layer
from lightning_parallel.techniques.tensor.maps import Products, split_maps
from lightning_parallel.techniques.tensor.plan import TensorPlan
from lightning_parallel.techniques.tensor.regions import ReplicatedRegion, SequenceRegion
from lightning_parallel.techniques.tensor.split_layer import Flow, SplitLayer


def apply_tensor(
    stacks: Sequence[Sequence[tuple[str, nn.Module]]],
    plan: TensorPlan,
    mesh: DeviceMesh,
    *,
    peers: ProcessGroup,
    sequence: bool = False,
    products: Products | None = None,
) -> list[Lengths]:
    """Split the linear maps of the layers over `mesh`, in place: their parameters become DTensors. Names stay.

    Args:
        stacks: For each stack its layers with their paths, in the order in which they run; whole and equal on every
            rank, or on the meta device.
        plan: The role of each linear map.
        mesh: One axis: the ranks that share a matrix product.
        peers: All ranks that hold these layers, a group for host memory.
        sequence: Whether each rank has a part of the positions between branches.
        products: Says how the parts of maps multiply; as `nn.Linear` does, if left out.

    Returns:
        For each stack, the lengths of sequences that are split; empty without `sequence`.
    """
    group: ProcessGroup = mesh.get_group()
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    flows: dict[Any, Flow] = {}
    lengths = [Lengths(mesh.size(), remedy=_remedy(stack)) for stack in stacks] if sequence else []
    for number, stack in enumerate(stacks):
        for index, (path, layer) in enumerate(stack):
            roles = plan.below(path)
            if (not roles and not sequence) or any(layer is earlier for _, earlier in stack[:index]):
                continue
            # Layers that compute alike are compared with their unsplit selves only once.
            key = number, tuple(roles.items()), kind_of(layer)
            flow = flows.setdefault(key, Flow(path, mesh, peers))
            is_first, is_last = index == 0, index == len(stack) - 1
            region = (
                SequenceRegion(group, is_first=is_first, is_last=is_last, lengths=lengths[number])
                if sequence
                else ReplicatedRegion(group)
            )
            split = SplitLayer(path, flow, region, lengths[number] if sequence else None)
            split_maps(layer, roles, split, parameters, products=products)
            _split_layer(layer, roles, split)
    return lengths


def _remedy(stack: Sequence[tuple[str, nn.Module]]) -> str:
    return ", or ".join(filter(None, [joined_behind_each([path for path, _ in stack]), "sequence=False"]))


def _split_layer(layer: nn.Module, roles: dict[str, str], split: SplitLayer) -> None:
    if split.lengths is not None:
        parents = dict.fromkeys(name.rpartition(".")[0] for name, role in roles.items() if role == "colwise")
        for parent in (layer.get_submodule(name) for name in parents if name):
            parent.__class__ = _torch.modules.subclass_like(
                type(parent), functools.partialmethod(_branching, split, type(parent))
            )
    layer.__class__ = _torch.modules.subclass_like(type(layer), functools.partialmethod(_splitting, split, type(layer)))


def _branching(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    return split.branch(functools.partial(cls.forward, self), args, kwargs)


def _splitting(self: Any, split: SplitLayer, cls: type[Any], *args: Any, **kwargs: Any) -> Any:
    # Hugging Face fills a cache in training, too, where it is never read; here it would have some of the heads only.
    if torch.is_grad_enabled():
        args = tuple(without_fresh_cache(self, args))
        kwargs = dict(zip(kwargs, without_fresh_cache(self, kwargs.values()), strict=True))
    function = functools.partial(cls.forward, self)
    if not (split.flow.has_checked_gradients if torch.is_grad_enabled() else split.flow.is_checked):
        check_layer(self, split, function, args, kwargs)
    return split.run(self, function, args, kwargs)
