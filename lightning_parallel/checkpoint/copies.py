"""Copies of checkpoints, which training does not change."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

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
    memo: dict[int, Any] = {}

    def copied(each: Any) -> Any:
        if isinstance(each, Tensor):
            is_kept = living is not None and memory_of(each) not in living
            return each if is_kept else copied_tensor(each, memo)
        if isinstance(each, Mapping) and hasattr(each, "copy"):
            twin: Any = copy.copy(each)
            for key, inner in each.items():
                twin[key] = copied(inner)  # one by one: to update a Counter is to add
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


def copied_tensor(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """A copy of a tensor with memory of its own, of its kind and with its marks.

    Args:
        tensor: The tensor.
        memo: What has been copied before: tensors that share memory share it in their copies, too.
    """
    if hasattr(type(tensor), "__tensor_flatten__") and not isinstance(tensor, DTensor):
        # One that is made of others, as in 8 bits, which may not know how to be copied.
        packed: Any = tensor
        names, known = packed.__tensor_flatten__()
        inner = {name: copied_tensor(getattr(tensor, name), memo) for name in names}
        twin: Tensor = type(packed).__tensor_unflatten__(inner, known, tensor.shape, tensor.stride())
        return twin
    if isinstance(tensor, DTensor) or not tensor.is_leaf:
        return tensor.detach().clone()
    return copy.deepcopy(tensor, memo)
