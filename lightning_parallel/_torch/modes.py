"""Function modes, dispatch modes and the compiler: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode


@contextlib.contextmanager
def outside_of(mode: Any) -> Iterator[None]:
    """Inside this context, `mode` is off if it was entered last: compilers would trace it otherwise."""
    if mode is None or torch.overrides._get_current_function_mode() is not mode:
        yield
        return
    with torch.overrides._pop_mode_temporarily():
        yield


def leave(mode: TorchFunctionMode) -> None:
    """Leave `mode`, wherever it is: modes that were entered after it, and are still on, stay.

    `torch.overrides._pop_mode` and `_push_mode`, since 1.13; a mode's own `__exit__` ends the latest one.
    """
    above = []
    while (latest := torch.overrides._get_current_function_mode()) is not None:
        torch.overrides._pop_mode()
        if latest is mode:
            break
        above.append(latest)
    for each in reversed(above):
        torch.overrides._push_mode(each)


@contextlib.contextmanager
def outside_of_all() -> Iterator[None]:
    """Inside this context, every `TorchFunctionMode` is off, and on again after it.

    `torch.overrides._pop_mode_temporarily`, since 1.13; `DisableTorchFunction` would switch off subclasses, too.
    """
    with contextlib.ExitStack() as stack:
        while torch.overrides._get_current_function_mode() is not None:
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        yield


Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Keep `function` out of graphs: the compiler cannot trace collectives that have their own backward.

    `torch.compiler.disable`, since 2.1; public, and here because it has no annotations.
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def part_of_graphs_only(function: Function) -> Function:
    """Compile `function` as part of a graph that calls it, never on its own.

    For `__torch_function__` of a mode: where a layer under it is not compiled, for example because another strategy
    has compiled it before, torch 2.13 compiles the mode's own function for each operation, and wrongly: a product gets
    the shape of its operand. `tests/strategies/test_user_code.py` shows it.
    `torch._dynamo.eval_frame.skip_code`, since 2.1; `torch.compiler.disable` would break the graph at every operation.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Switch off `TorchDispatchMode`s, for operations that they should neither count nor save.

    `torch.utils._python_dispatch._disable_current_modes`, since 2.0; no public spelling.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def without_function_modes() -> contextlib.AbstractContextManager[None]:
    """Switch off `TorchFunctionMode`s, for code that is called by one. `torch._C.DisableTorchFunction`, since 1.13."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def activation_budget(budget: float) -> contextlib.AbstractContextManager[None]:
    """Inside this context, compiled functions keep at most a share `budget` of their activations for backward.

    `torch._functorch.config.activation_memory_budget`, since 2.4; no public spelling.
    """
    if budget == 1.0:
        return contextlib.nullcontext()
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)  # type: ignore[no-any-return]


NO_FUNCTION_OVERRIDE = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that handles operations below autograd only; since 1.7, no public name."""
