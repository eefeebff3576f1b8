"""The state of a module apart from its parameters, to be put back after code of the user's has run on trial."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Collection, Iterator

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
        written: Names of parameters that the code writes into; a copy of each is held.
    """

    def __init__(self, module: nn.Module, written: Collection[str] = ()) -> None:
        # Tables of hooks are ordered: Hugging Face installs hooks when outputs are first asked for, and notes it
        # elsewhere.
        containers = (*CONTAINERS, OrderedDict)
        children = held_modules(module).values()
        self._states = [
            ObjectState(child, lambda name, _: name not in _KEPT_APART, containers=containers) for child in children
        ]
        values = (value for state in self._states for value in state.attributes.before.values())
        parameters = (parameter for name, parameter in module.named_parameters() if name in written)
        tensors = dict.fromkeys([*tensors_inside(values), *module.buffers(), *parameters])
        self._numbers = Numbers(t for t in tensors if not t.is_meta and not isinstance(t, DTensor))
        self._objects = HeldObjects(children)

    def restore(self) -> None:
        """Put everything back, as often as needed."""
        self._objects.restore()
        for state in self._states:
            state.restore()
        self._numbers.restore()


@contextlib.contextmanager
def parameter_writes(module: nn.Module, names: set[str]) -> Iterator[None]:
    """Note which parameters are written into in this context, as those of a teacher are that follows in a step.

    Args:
        module: The module.
        names: To which their names are added.
    """
    before = _places(module)
    yield
    names.update(name for name, place in _places(module).items() if before.get(name) != place)


def _places(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Where the numbers of each parameter are, and how often it was written, which ``.data = ...`` does not count."""
    return {name: (parameter.data_ptr(), parameter._version) for name, parameter in module.named_parameters()}


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer of that name is part of the state dict."""
    path, _, attribute = name.rpartition(".")
    return attribute not in module.get_submodule(path)._non_persistent_buffers_set
