"""Autograd and checkpointing: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


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


@contextlib.contextmanager
def checkpoints_replaced(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside this context, `torch.utils.checkpoint.checkpoint` runs ``wrap(function)``, in forward and in backward.

    The names that `checkpoint` looks up in its module are replaced, because `checkpoint` itself may have been imported
    under any name: `CheckpointFunction`, since 1.0, and `_checkpoint_without_reentrant_generator`, since 2.1 (with
    `_impl` at its end since 2.14).

    Args:
        wrap: From the function to be checkpointed to the one that is run.
    """
    from torch.utils import checkpoint as module

    checkpoint: Any = module
    names = ("_checkpoint_without_reentrant_generator_impl", "_checkpoint_without_reentrant_generator")
    name = next(each for each in names if hasattr(checkpoint, each))
    reentrant, generator = checkpoint.CheckpointFunction, getattr(checkpoint, name)

    def apply(function: Callable[..., Any], *args: Any) -> Any:
        return reentrant.apply(wrap(function), *args)

    def without_reentrant(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(wrap(function), *args, **kwargs)

    checkpoint.CheckpointFunction = SimpleNamespace(apply=apply)
    setattr(checkpoint, name, without_reentrant)
    try:
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant
        setattr(checkpoint, name, generator)


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
