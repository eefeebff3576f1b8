"""Substitution of received tensors for placeholders, which the variables of the user's step keep."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lightning_parallel import _torch


class Substitutes:
    """Map from placeholders to the tensors that replace them."""

    def __init__(self) -> None:
        # The placeholder is kept alive, so that no other object gets its `id`.
        self._pairs: dict[int, tuple[Any, Tensor]] = {}

    def put(self, placeholder: Any, tensor: Tensor) -> None:
        """Replace `placeholder` by `tensor` from here on.

        Args:
            placeholder: The placeholder.
            tensor: Its replacement.
        """
        self._pairs[id(placeholder)] = placeholder, tensor

    def replace(self, values: Any) -> Any:
        """Copy nested containers, with placeholders replaced; without any, they are the same."""
        if not self._pairs:
            return values
        return tree_map(lambda value: self._pairs[id(value)][1] if id(value) in self._pairs else value, values)

    def clear(self) -> None:
        """Forget all replacements."""
        self._pairs.clear()


class SubstitutionMode(TorchFunctionMode):
    """Mode in which operations get replacements where they are given placeholders.

    Args:
        replace: From nested arguments to the same with replacements.
        note: Called with the arguments of an operation before they were replaced, and its result.
    """

    def __init__(self, replace: Callable[[Any], Any], note: Callable[[Any, Any], None]) -> None:
        super().__init__()
        self._replace, self._note = replace, note

    @_torch.modes.part_of_graphs_only
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        args, kwargs = self._replace(given)
        result = func(*args, **kwargs)
        self._note(given, result)
        return result
