"""Operations of an optimizer that take several of its parameters together: private names of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

_OF_LISTS = ("aten::_foreach_", "aten::_fused_", "aten::_amp_foreach_")
"""Operations on lists, each of whose entries is computed by itself."""
_READ = "aten::_local_scalar_dense"


class JointOperations(TorchDispatchMode):
    """Mode that calls `found` at the first operation on what comes of two parameters, or of their gradients.

    A number that is read of one parameter on the host before another one is written counts as such, too.
    `torch.utils._python_dispatch.TorchDispatchMode`, since 1.12, and `torch.utils.weak.WeakIdKeyDictionary`, since 2.0,
    have no public spelling, and nor has the schema of an operation, `_schema`.

    Args:
        optimizer: Its parameters and their gradients are looked at, as they are when the mode is entered.
        found: Called in the middle of the update; may raise.
    """

    def __init__(self, optimizer: Optimizer, found: Callable[[], None]) -> None:
        super().__init__()
        self._found = found
        self._optimizer = optimizer
        self._sources: Any = WeakIdKeyDictionary()
        self._read: set[int] = set()

    @override
    def __enter__(self) -> Any:
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(dict.fromkeys(parameters)):
            for tensor in (parameter, parameter.grad):
                if tensor is not None:
                    self._sources[tensor] = frozenset({number})
        return super().__enter__()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith(_OF_LISTS):
            return self._of_lists(func, args, kwargs)
        sources = self._sources_of(tree_leaves((args, kwargs)))
        if len(sources) > 1:
            self._found()
            sources = frozenset()  # of what is done around the update, which may be to all parameters
        if name == _READ:
            self._read |= sources
        elif func._schema.is_mutable:
            self._written(args, kwargs, func, sources)
        result = func(*args, **kwargs)
        if sources:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._sources[tensor] = sources
        return result

    def _written(self, args: Any, kwargs: Any, func: Any, sources: frozenset[int]) -> None:
        """Note what a write makes of its target."""
        names = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)}
        given = {**names, **kwargs}
        changed = [each.name for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
        written = [given[name] for name in changed if isinstance(given.get(name), Tensor)]
        targets = self._sources_of(written)
        if targets and self._read - targets:
            self._found()
        if targets:
            self._read = set()
        for tensor in written:
            if sources:
                self._sources[tensor] = sources

    def _of_lists(self, func: Any, args: Any, kwargs: Any) -> Any:
        lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
        entries = [self._sources_of(tree_leaves(entry)) for entry in zip(*lists, strict=False)]
        if any(len(sources) > 1 for sources in entries) or self._read - frozenset().union(*entries):
            self._found()
        result = func(*args, **kwargs)
        for sources, tensor in zip(entries, result if isinstance(result, list | tuple) else (), strict=False):
            if isinstance(tensor, Tensor) and sources:
                self._sources[tensor] = sources
        return result

    def _sources_of(self, values: Iterable[Any]) -> frozenset[int]:
        tensors = [value for value in values if isinstance(value, Tensor)]
        return frozenset().union(*(self._sources.get(tensor, frozenset()) for tensor in tensors))
