"""Operations on lists of tensors of which only some are DTensors: private or version-dependent names of torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lightning_parallel._torch.tensors import operations

_UNARY = ("abs", "exp", "log", "neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign", "sqrt", "tanh", "zero")
_OF_TWO = ("add", "clamp_max", "clamp_min", "copy", "div", "maximum", "minimum", "mul", "pow", "sub")
_OTHERS = (*_OF_TWO, "addcdiv", "addcmul", "lerp")
_IN_PLACE = tuple(f"_foreach_{name}_" for name in (*_UNARY, *_OTHERS))
_OF_TENSORS = {"maximum": "clamp_min", "maximum_": "clamp_min_", "minimum": "clamp_max", "minimum_": "clamp_max_"}
"""Operations on lists that take numbers, too -> those on a tensor that do."""
_NORMS = operations("_foreach_norm")
_OF_LISTS = _NORMS | operations(*_IN_PLACE, *(name.removesuffix("_") for name in _IN_PLACE))


@functools.cache
def take_mixed_lists() -> None:
    """Let operations on lists take plain tensors beside DTensors, and DTensors of several meshes; once and for good.

    `torch.nn.utils.clip_grad_norm_` and optimizers with ``foreach=True`` give all gradients to one operation, which
    torch refuses where tensor parallelism splits only some parameters. Lists of one kind stay as torch has them.

    `DTensor._op_dispatcher._custom_op_handlers`, since 2.1, has the handlers of single operations, in all supported
    versions; there is no public hook.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    of_lists = [each for each in _OF_LISTS if not any(argument.is_out for argument in each._schema.arguments)]
    handlers.update({each: _by_kind for each in of_lists if each not in handlers})


def as_torch_has_it(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on DTensors without its handler here.

    Handlers run below functions of torch, such as in backward; through `torch._C.DisableTorchFunctionSubclass`, since
    2.0, the operation does not go to `DTensor.__torch_function__` as if user code had called it, which it does in 2.15.
    """
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handler = handlers.pop(operation)
    try:
        with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
            return operation(*args, **kwargs)
    finally:
        handlers[operation] = handler


def _by_kind(operation: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the tensors of each kind: plain ones, and those of each mesh."""
    tensors: Sequence[Tensor] = args[0]
    kinds = [tensor.device_mesh if isinstance(tensor, DTensor) else None for tensor in tensors]
    distinct = list(dict.fromkeys(kinds))
    if len(distinct) == 1 and distinct[0] is not None:
        return _of_one_kind(operation, [_like(each, distinct[0]) for each in args], kwargs)
    results: list[Any] = [None] * len(tensors)
    for kind in distinct:
        places = [place for place, other in enumerate(kinds) if other == kind]
        chosen = [_like(_chosen(each, places, len(tensors)), kind) for each in args]
        found = operation(*chosen, **kwargs) if kind is None else _of_one_kind(operation, chosen, kwargs)
        for place, result in zip(places, found or (), strict=False):
            # Norms are going to be stacked, which torch refuses for several kinds, too.
            is_norm = operation in _NORMS and isinstance(result, DTensor)
            results[place] = result.full_tensor() if is_norm else result
    return None if operation._schema.name.endswith("_") else results


def _of_one_kind(operation: Any, args: Any, kwargs: Any) -> Any:
    """The operation on DTensors of one mesh; on one after the other, where torch has no rule for lists of them."""
    try:
        return as_torch_has_it(operation, args, kwargs)
    except NotImplementedError:
        name = operation._schema.name.rpartition("_foreach_")[2]
        found = [_of_one(name, args, kwargs, place) for place in range(len(args[0]))]
        return None if name.endswith("_") else found


def _of_one(name: str, args: Any, kwargs: Any, place: int) -> Any:
    own = [_at(value, place, len(args[0])) for value in args]
    if name.startswith("addc") and len(own) == 4:  # of one tensor, the factor is given by name
        return getattr(Tensor, name)(*own[:3], value=own[3])
    return getattr(Tensor, _OF_TENSORS.get(name, name))(*own, **kwargs)


def _at(value: Any, place: int, size: int) -> Any:
    """The part of an argument that is for one tensor of a list."""
    return value[place] if isinstance(value, list | tuple) and len(value) == size else value


def _chosen(value: Any, places: Sequence[int], size: int) -> Any:
    """The part of an argument that belongs to the tensors at `places` of `size`."""
    return [value[place] for place in places] if isinstance(value, list | tuple) and len(value) == size else value


def _like(value: Any, mesh: DeviceMesh | None) -> Any:
    """An argument for tensors of one kind: whole plain tensors beside plain ones, else DTensors of that mesh."""
    if isinstance(value, list | tuple):
        return [_like(each, mesh) for each in value]
    if isinstance(value, DTensor):
        if value.device_mesh == mesh:
            return value
        value = value.full_tensor()
    if mesh is None or not isinstance(value, Tensor) or not value.ndim:
        return value
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
