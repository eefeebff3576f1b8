"""Run code of the user's for what it tells, and leave no trace of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_parallel.module.dry_run import side_effects_undone
from lightning_parallel.module.hidden_states import hidden_in, with_hidden
from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.module.kv_cache import is_cache
from lightning_parallel.module.left_places import is_of_user
from lightning_parallel.module.left_values import TAKEN, Before, LeftValue, LeftValues
from lightning_parallel.module.own_counts import OwnCounts
from lightning_parallel.module.placeholders import (
    is_placeholder,
    placeholder_like,
    placeholders_in,
    placeholders_in_place,
)

_REMEMBERED = 4096
"""Number of results of layers of other stages that are remembered: shapes only, about a kilobyte each."""


class InferredShapes:
    """Results of layers of other stages as placeholders, found by running each kind of call on placeholders once.

    Args:
        left: Finds what layers leave elsewhere.
    """

    def __init__(self, left: LeftValues) -> None:
        self.is_running = False
        """Whether a layer is run just now."""
        self.left: tuple[Before, list[LeftValue]] | None = None
        """The values that the last one has left, which are at their places."""
        self.counted: list[str] = []
        """Names of numbers that the last one has changed: outside of it, or inside, and again in another run."""
        self._left_values, self._leaving = left, set[int]()
        self._results: dict[Any, Any] = {}

    def result(
        self,
        index: int,
        layer: nn.Module,
        forward: Callable[..., Any],
        used: Any,
        given: Any,
        *,
        path: str,
        is_on_placeholders: bool,
    ) -> Any:
        """The result of `forward` of layer `index`, as placeholders.

        Args:
            index: The place of the layer in its stack.
            layer: The layer.
            forward: Its own forward, past what was put around it.
            used: Its arguments, by position and by name.
            given: As the step has given them, in containers of its own.
            path: The path of the layer.
            is_on_placeholders: Whether all parameters of the module are placeholders already.
        """
        args, kwargs = tree_map(lambda value: None if is_cache(value) else value, used)
        key = (index, torch.is_grad_enabled(), *map(_kind, tree_leaves((args, kwargs))))
        self.left, self.counted = None, []
        # Hooks inside of a layer collect something for the step, in each call, and so may its own code.
        if key not in self._results or index in self._leaving or any(map(collecting_hooks, layer.modules())):
            if len(self._results) > _REMEMBERED:  # of batches whose length varies
                self.forget()
            hidden = hidden_in(args, kwargs)
            args, kwargs = with_hidden(hidden if is_placeholder(hidden) else placeholder_like(hidden), args, kwargs)
            before, forward = self._left_values.before(layer, (args, kwargs), given), with_hooks(layer, forward)
            own = OwnCounts(layer) if is_on_placeholders else None
            with self._running(), contextlib.nullcontext() if is_on_placeholders else _on_placeholders(layer):
                self._results[key] = tree_map(_as_value, forward(*args, **kwargs))
                found = before.found()
                inside = [] if own is None else _counted_again(own, layer, forward, args, kwargs)
            left = [each for each in found if placeholders_in(each.value)]
            self.counted = [
                each.name for each in found if each.key in TAKEN or (each.counts and not each.is_inside(path))
            ]
            self.counted += [f"{path}.{name}" for name in inside]
            if left:
                self._leaving.add(index)
                before.put(left)
                self.left = before, left
        return tree_map(lambda value: value.detach() if is_placeholder(value) else value, self._results[key])

    def forget(self) -> None:
        """Find them anew from now on."""
        self._results.clear()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self.is_running = True
        try:
            with torch.compiler.set_stance("force_eager"):  # nothing is computed, and graphs have no placeholders
                yield
        finally:
            self.is_running = False


@contextlib.contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Leave no trace of a run on `module`: attributes, lists, hooks, buffers, states of metrics."""
    before = KeptState(module)
    try:
        yield
    finally:
        before.restore()


def fill_cache(layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Let a layer of another rank add to the key-value cache among its arguments: placeholders, which have a length.

    Args:
        layer: The layer.
        forward: Its own forward, past what was put around it.
        args: What it is given.
        kwargs: The same.
    """
    hidden = hidden_in(args, kwargs)
    args, kwargs = with_hidden(placeholder_like(hidden), args, kwargs)
    with _on_placeholders(layer):
        forward(*args, **kwargs)


def collecting_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Hooks of Hugging Face's that collect what a module returns, such as ``output_hidden_states=True`` asks for."""
    hooks = module._forward_hooks.values()
    return [hook for hook in hooks if (getattr(hook, "__module__", None) or "").startswith("transformers.")]


def with_hooks(layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with the forward hooks that the user has put on a layer itself.

    Args:
        layer: The layer.
        forward: Its own forward, past what was put around it.
    """
    first = [pair for pair in layer._forward_pre_hooks.items() if is_of_user(pair[1])]
    last = [pair for pair in layer._forward_hooks.items() if is_of_user(pair[1])]
    if not first and not last:
        return forward

    def run(*args: Any, **kwargs: Any) -> Any:
        for number, hook in first:
            if number in layer._forward_pre_hooks_with_kwargs:
                args, kwargs = hook(layer, args, kwargs) or (args, kwargs)
            elif (found := hook(layer, args)) is not None:
                args = found if isinstance(found, tuple) else (found,)
        result = forward(*args, **kwargs)
        for number, hook in last:
            given = (args, kwargs) if number in layer._forward_hooks_with_kwargs else (args,)
            found = hook(layer, *given, result)
            result = result if found is None else found
        return result

    return run


def _counted_again(own: OwnCounts, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> list[str]:
    """The numbers of a layer that each run changes, of which the first has changed some: unlike a length that it keeps.

    Args:
        own: The numbers before the first run.
        layer: The layer.
        forward: Runs it.
        args: Its arguments.
        kwargs: Those by name.
    """
    names = own.changed()
    if not names:
        return []
    own = OwnCounts(layer)
    with side_effects_undone(layer, (args, kwargs)):
        forward(*args, **kwargs)
        return [name for name in own.changed() if name in names]


@contextlib.contextmanager
def _on_placeholders(layer: nn.Module) -> Iterator[None]:
    with torch.no_grad(), unchanged(layer), placeholders_in_place(layer):
        yield


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf)


def _as_value(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
