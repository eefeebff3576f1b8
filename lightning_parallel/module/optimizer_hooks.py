"""Hooks just before and just after the update of a user's optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def register_update_hooks(
    optimizer: Optimizer, *, before: Callable[[], None], after: Callable[[], None]
) -> list[RemovableHandle]:
    """Call `before` when the gradients are complete, and `after` when `optimizer` has used them.

    torch's own hook before the step would run too early: Lightning gives `step` a closure that runs forward, backward
    and clipping.

    Args:
        optimizer: Any optimizer of torch.
        before: Called after the closure, if there is one, and before the update.
        after: Called when the step has ended.

    Returns:
        Handles with `remove()`.

    Example:
        >>> handles = register_update_hooks(optimizer, before=show_gradients, after=show_weights)
    """

    def then_before(closure: Callable[[], Any]) -> Callable[[], Any]:
        def closure_then_before() -> Any:
            result = closure()
            before()
            return result

        return closure_then_before

    def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": then_before(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:  # torch counts the optimizer itself as the first argument
            return (args[0], then_before(args[1]), *args[2:]), kwargs
        before()
        return None

    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(lambda *_: after()),
    ]
