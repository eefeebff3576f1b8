"""The state of a module apart from its parameters, to be put back after code of the user's has run on trial."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_parallel.module.held_modules import held_modules
from lightning_parallel.module.held_objects import HeldObjects
from lightning_parallel.module.object_state import CONTAINERS, Numbers, ObjectState, tensors_inside

_KEPT_APART = ("_parameters", "_modules")


class KeptState:
    """Attributes, lists, hooks, buffers, states of metrics, and objects of the user's that a module holds.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        # Tables of hooks are ordered: Hugging Face installs hooks when outputs are first asked for, and notes it
        # elsewhere.
        containers = (*CONTAINERS, OrderedDict)
        children = held_modules(module).values()
        self._states = [
            ObjectState(child, lambda name, _: name not in _KEPT_APART, containers=containers) for child in children
        ]
        values = (value for state in self._states for value in state.attributes.before.values())
        tensors = dict.fromkeys([*tensors_inside(values), *module.buffers()])
        self._numbers = Numbers(t for t in tensors if not t.is_meta and not isinstance(t, DTensor))
        self._objects = HeldObjects(children)

    def restore(self) -> None:
        """Put everything back, as often as needed."""
        self._objects.restore()
        for state in self._states:
            state.restore()
        self._numbers.restore()
