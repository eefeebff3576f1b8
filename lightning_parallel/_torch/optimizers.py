"""Lists that optimizers of torch gather for a step, and the order of their hooks: private names of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_parallel._torch.whole_operands import pause, resume


def intercept_gathered(optimizer: Any, change: Callable[[Sequence[list[Any]]], None]) -> Callable[[], None]:
    """Call `change` with the lists of parameters, gradients and states that a group of `optimizer` is stepped with.

    `_init_group` of torch's optimizers, since 2.0, fills these lists, parameters first and gradients second, with an
    entry in each for every parameter that has a gradient, or none for a state that is not kept. The update takes what
    is in them then. There is no public spelling. `torch._guards.TracingContext`, since 2.0, is there while the compiler
    traces, which runs this function as it is; `torch.compiler.is_compiling` is false then.

    Args:
        optimizer: An optimizer of torch, not a subclass of one.
        change: May replace entries.

    Returns:
        What ends it.
    """
    plain = optimizer._init_group

    @functools.wraps(plain)
    def gather(group: dict[str, Any], *lists: list[Any]) -> Any:
        # The compiler of a user's `step` runs this once, while it traces, and finds sources of what is in the lists.
        if group["differentiable"] or torch.compiler.is_compiling() or TracingContext.try_get() is not None:
            return plain(group, *lists)
        pause()
        try:
            result = plain(group, *lists)
            change(lists)
        finally:
            resume()
        return result

    optimizer._init_group = gather
    return functools.partial(vars(optimizer).pop, "_init_group", None)


def is_initialized(optimizer: object) -> bool:
    """Whether the optimizer has what `Optimizer.__init__` gives one: wrappers of another one may go without it.

    `Optimizer._optimizer_state_dict_pre_hooks`, since 2.1; there is no public name.

    Args:
        optimizer: The user's.
    """
    return hasattr(optimizer, "_optimizer_state_dict_pre_hooks")


def register_first_post_hook(optimizer: Optimizer, hook: Callable[[], None]) -> RemovableHandle:
    """Call `hook` after each step of `optimizer`, before all hooks that are called then.

    `Optimizer._optimizer_step_post_hooks`, since 2.1; waits for a `prepend` of `register_step_post_hook`.
    """
    handle = optimizer.register_step_post_hook(lambda *_: hook())
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]
    return handle
