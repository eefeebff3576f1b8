"""Autograd and checkpointing: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Checkpointed = Callable[..., Any]
"""Takes a function and its arguments, and checkpoints it."""
_OPTIONS = (
    "preserve_rng_state",
    "context_fn",
    "determinism_check",
    "debug",
    "early_stop",
    "respect_saved_tensors_hooks",
)


def after_backward(tensor: Tensor, action: Any) -> None:
    """Run `action` once at the end of the backward pass that goes through `tensor`.

    The autograd engine's `queue_callback`, since 1.0; DDP and FSDP use it themselves, there is no public spelling.

    Args:
        tensor: A tensor that requires a gradient.
        action: Called without arguments.
    """
    from torch.autograd import Variable

    # The engine takes callbacks only while a backward runs, so a hook inside that backward has to register it.
    def queue(gradient: Tensor) -> None:
        Variable._execution_engine.queue_callback(action)

    tensor.register_hook(queue)


def hooks_of(leaf: Tensor) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks of a leaf: those that `Tensor.register_hook` has added, and `register_post_accumulate_grad_hook`.

    `Tensor._backward_hooks`, since 0.2, and `_post_accumulate_grad_hooks`, since 2.1; there is no public spelling.

    Args:
        leaf: The leaf.
    """
    tables: Any = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    own, later = (list((table or {}).values()) for table in tables)
    return own, later


@contextlib.contextmanager
def checkpoints_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside this context, `torch.utils.checkpoint.checkpoint` runs ``wrap(function)``, in forward and in backward.

    The names that `checkpoint` looks up in its module are replaced, because `checkpoint` itself may have been imported
    under any name: `CheckpointFunction`, since 1.0, and `_checkpoint_without_reentrant_generator`, since 2.1 (with
    `_impl` at its end since 2.14).

    Args:
        wrap: From the function to be checkpointed to the one that is run.
    """

    def reentrant(apply: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
        return apply(wrap(function), *args)

    def generator(make: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return make(wrap(function), *args, **kwargs)

    with _both_replaced(reentrant, generator):
        yield


@contextlib.contextmanager
def checkpoints_opened(opened: Callable[[Checkpointed], AbstractContextManager[None] | None]) -> Iterator[None]:
    """Inside this context, `torch.utils.checkpoint.checkpoint` may run its function as it is, without a checkpoint.

    The names are those of `checkpoints_replaced`.

    Args:
        opened: Takes a function that checkpoints any other one with the same options, and returns the context in which
            the function of the user runs; ``None`` where it is to be checkpointed as a whole.
    """
    from torch.utils import checkpoint as module

    checkpoint: Any = module

    def reentrant(apply: Callable[..., Any], function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        again = functools.partial(checkpoint.checkpoint, use_reentrant=False, preserve_rng_state=preserve)
        context = opened(again)
        if context is None:
            return apply(function, preserve, *args)
        with context:
            return function(*args)

    def generator(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        options = {name: given[name] for name in _OPTIONS if name in given}
        context = opened(functools.partial(checkpoint.checkpoint, use_reentrant=False, **options))
        return make(*args, **kwargs) if context is None else _inside(context)

    with _both_replaced(reentrant, generator):
        yield


def _inside(context: AbstractContextManager[None]) -> Iterator[None]:
    with context:
        yield


@contextlib.contextmanager
def _both_replaced(reentrant: Callable[..., Any], generator: Callable[..., Any]) -> Iterator[None]:
    """Inside this context, both ways of `checkpoint` are these; what they replace is their first argument."""
    from torch.utils import checkpoint as module

    checkpoint: Any = module
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    name = next(each for each in names if hasattr(checkpoint, each))
    function, make = checkpoint.CheckpointFunction, getattr(checkpoint, name)
    checkpoint.CheckpointFunction = SimpleNamespace(apply=functools.partial(reentrant, function.apply))
    setattr(checkpoint, name, functools.partial(generator, make))
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = function
        setattr(checkpoint, name, make)


@contextlib.contextmanager
def reentrant_checkpoints_avoided() -> Iterator[None]:
    """In here, what a layer checkpoints is computed again in the way that `torch.autograd.grad` can go through.

    `CheckpointFunction`, since 1.0: reentrant backward takes sums into `.grad` only, of all that it comes upon.
    """
    from torch.utils import checkpoint as module

    checkpoint: Any = module
    reentrant = checkpoint.CheckpointFunction

    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    checkpoint.CheckpointFunction = SimpleNamespace(apply=apply)
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant


def is_in_backward() -> bool:
    """Whether this runs inside a backward pass, as recomputed activations do.

    `torch._C._current_graph_task_id`, since 2.1; no public spelling.
    """
    return torch._C._current_graph_task_id() != -1
