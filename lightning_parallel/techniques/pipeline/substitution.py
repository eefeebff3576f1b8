"""What takes the place of ghosts in a step of the user's, whose variables keep them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_parallel import _torch


class Substitutes:
    """Tensors in the place of ghosts."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Any, Tensor]] = {}  # with the ghost, so that no other takes its identity

    def put(self, placeholder: Any, tensor: Tensor) -> None:
        """From here on, `tensor` takes the place of `placeholder`."""
        self._pairs[id(placeholder)] = placeholder, tensor

    def replace(self, values: Any) -> Any:
        """Nested containers with what takes the place of each of their ghosts."""
        return tree_map(lambda value: self._pairs[id(value)][1] if id(value) in self._pairs else value, values)

    def clear(self) -> None:
        """Nothing takes the place of anything any more."""
        self._pairs.clear()


class SubstitutionMode(TorchFunctionMode):
    """Inside this context, operations take what stands in where they are given a ghost.

    Args:
        replace: From arguments to these.
    """

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        super().__init__()
        self._replace = replace

    @_torch.modes.part_of_graphs_only
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self._replace((args, kwargs or {}))
        return func(*args, **kwargs)
