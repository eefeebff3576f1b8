"""Copies of checkpoints, which training does not change."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_parallel.ranks.dtensors import local_of


def unshared(value: Any, living: Collection[int] | None = None) -> Any:
    """A copy of containers and tensors in host memory; tensors that share memory share it in the copy, too.

    Args:
        value: A checkpoint, or a part of one.
        living: Where the memory is that may change, as `memory_of` has it; other tensors are not copied. ``None`` for
            any.
    """
    memories: dict[int, Tensor] = {}

    def copied(each: Any) -> Any:
        if isinstance(each, Tensor):
            return each if living is not None and memory_of(each) not in living else _copied_tensor(each, memories)
        if isinstance(each, Mapping) and hasattr(each, "copy"):
            twin: Any = each.copy()
            twin.update({key: copied(inner) for key, inner in each.items()})
            return twin
        if type(each) in (list, tuple, set):
            return type(each)(copied(inner) for inner in each)
        return each

    return copied(value)


def kept_apart(
    checkpoint: Mapping[str, Any], module: nn.Module | None, optimizers: Iterable[Optimizer]
) -> dict[str, Any]:
    """A copy of what training may change; tensors that were gathered for the checkpoint are nobody else's.

    Args:
        checkpoint: As Lightning makes it.
        module: The module, if there is one.
        optimizers: Its optimizers.
    """
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    own_state = {} if module is None else module.state_dict()
    held = [*own_state.values(), *(each for state in states for each in state.values())]
    living = {memory_of(each) for each in held if isinstance(each, Tensor)}
    own = ("state_dict", "optimizer_states")
    return {key: unshared(value, living if key in own else None) for key, value in checkpoint.items()}


def memory_of(tensor: Tensor) -> int:
    """The place of a tensor's memory, of its local part if it is sharded; 0 for kinds that have none."""
    with contextlib.suppress(NotImplementedError, RuntimeError):
        return local_of(tensor).untyped_storage().data_ptr()
    return 0


def _copied_tensor(tensor: Tensor, memories: dict[int, Tensor]) -> Tensor:
    if hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, DTensor):
        # One that is made of others, as in 8 bits, which may not know how to be cloned.
        packed: Any = tensor
        names, known = packed.__tensor_flatten__()
        inner = {name: _copied_tensor(getattr(tensor, name), memories) for name in names}
        twin: Tensor = type(packed).__tensor_unflatten__(inner, known, tensor.shape, tensor.stride())
        return twin
    if type(tensor) is not Tensor or tensor.layout != torch.strided or not tensor.is_cpu:
        return tensor.detach().clone()
    storage = tensor.untyped_storage()
    if storage.data_ptr() not in memories:
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        memories[storage.data_ptr()] = whole.clone()
    own = memories[storage.data_ptr()].untyped_storage()
    return torch.empty(0, dtype=tensor.dtype).set_(own, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
