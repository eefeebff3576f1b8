"""The update of sharded parameters on this rank's parts, as plain tensors.

torch steps DTensors one by one, and each operation on one takes several times as long on the host as on a plain tensor.
Optimizers that compute each element by itself give the same numbers on the parts. On plain tensors torch chooses its
fast implementations by itself, also where a group holds parameters that are sharded over different meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from lightning_parallel import _torch

_ELEMENTWISE = frozenset({SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop, ASGD, Rprop})
"""torch's optimizers whose update of an element depends on that element, its gradient and its states alone."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is known to update each element by itself; a subclass may do anything."""
    return type(optimizer) in _ELEMENTWISE


class LocalUpdate:
    """Updates of a user's optimizer on this rank's parts of its parameters, until `detach`.

    Its groups, its state, what hooks and schedulers see, and checkpoints stay as they are: the update alone is given
    other tensors, which share memory with them.

    Args:
        optimizer: The user's; see `is_elementwise`.

    Example:
        >>> update = LocalUpdate(torch.optim.AdamW(sharded.parameters()))
    """

    def __init__(self, optimizer: Optimizer) -> None:
        assert is_elementwise(optimizer)
        self._optimizer = optimizer
        self._end = _torch.optimizers.intercept_gathered(optimizer, self._take_parts)
        # Part of a parameter -> the parameter, of the step that runs: an optimizer may note states by what it steps.
        self._parameters: dict[Tensor, DTensor] = {}
        self._handles = [
            _torch.optimizers.register_first_post_hook(optimizer, self._settle),
            optimizer.register_state_dict_pre_hook(lambda _: self._settle()),  # after a step that ended in an error
        ]

    def detach(self) -> None:
        """Let `optimizer` step its parameters as they are."""
        self._settle()
        self._end()
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _take_parts(self, lists: Sequence[list[Any]]) -> None:
        """Replace what an update is given by this rank's parts, if all of it is sharded alike.

        Args:
            lists: Parameters, gradients, and states of each kind.
        """
        self._settle()
        parameters = list(lists[0])
        lists = [entries for entries in lists if len(entries) == len(parameters)]  # others are of states not kept
        if not all(map(_are_alike, parameters, zip(*lists[1:], strict=True))):
            return
        # The parts have counters of their own, by which nobody would see that the parameters were written.
        torch.autograd.graph.increment_version(p for p in parameters if isinstance(p, DTensor))
        for entries in lists:
            entries[:] = [entry.to_local() if isinstance(entry, DTensor) else entry for entry in entries]
        pairs = zip(lists[0], parameters, strict=True)
        self._parameters = {part: parameter for part, parameter in pairs if isinstance(parameter, DTensor)}

    @torch.no_grad()
    def _settle(self) -> None:
        """Note states that the optimizer has made for parts as states of their parameters."""
        parameters, self._parameters = self._parameters, {}
        state = self._optimizer.state
        for part, parameter in parameters.items():
            for name, value in state.pop(part, {}).items():
                own = state[parameter].get(name)
                if not (isinstance(own, DTensor) and own.to_local() is value):
                    state[parameter][name] = _like(value, parameter)


def _are_alike(parameter: Tensor, others: Sequence[Any]) -> bool:
    """Whether parts of the gradient and of states belong to the same elements as the part of the parameter."""
    if not isinstance(parameter, DTensor):
        return not any(isinstance(other, DTensor) for other in others)
    if any(placement.is_partial() for placement in parameter.placements):
        return False
    return all(_is_like(other, parameter) for other in others)


def _is_like(other: Any, parameter: DTensor) -> bool:
    if isinstance(other, DTensor):
        return other.device_mesh == parameter.device_mesh and other.placements == parameter.placements
    # Counters and rates are numbers; a missing state is made from the gradient.
    return not isinstance(other, Tensor) or other.ndim == 0


def _like(value: Any, parameter: DTensor) -> Any:
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    # Not by `DTensor.from_local`, which would move an offloaded state to the device of the mesh.
    state: Any = torch.empty_like(parameter, dtype=value.dtype)
    state.to_local().copy_(value)
    return state
