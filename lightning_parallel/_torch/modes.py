"""Modes of functions and dispatch, and the compiler: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch


@contextlib.contextmanager
def outside_of(mode: Any) -> Iterator[None]:
    """In here, `mode` is not entered, if it was the last one to be: compilers would trace it."""
    if mode is None or torch.overrides._get_current_function_mode() is not mode:
        yield
        return
    with torch.overrides._pop_mode_temporarily():
        yield


Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Leave `function` out of graphs: the compiler cannot see through collectives with a backward of their own.

    `torch.compiler.disable`, since 2.1; public, and here because it has no annotations.
    """
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


def part_of_graphs_only(function: Function) -> Function:
    """Compile `function` where a graph runs into it, and never for itself.

    For `__torch_function__` of a mode: where a layer under it is left uncompiled, perhaps because another strategy has
    had it compiled before, torch 2.13 compiles the mode's own function for each operation, and gets it wrong: a product
    is handed the shape of its operand. `tests/strategies/test_user_code.py` shows it.
    `torch._dynamo.eval_frame.skip_code`, since 2.1; `torch.compiler.disable` would end a graph at every operation.
    """
    torch._dynamo.eval_frame.skip_code(function.__code__)
    return function


def without_dispatch_modes() -> contextlib.AbstractContextManager[Any]:
    """Switch off `TorchDispatchMode`s, for operations that nobody shall count or keep.

    `torch.utils._python_dispatch._disable_current_modes`, since 2.0; no public spelling.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def without_function_modes() -> contextlib.AbstractContextManager[None]:
    """Switch off `TorchFunctionMode`s, for code that is called by one. `torch._C.DisableTorchFunction`, since 1.13."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


def activation_budget(budget: float) -> contextlib.AbstractContextManager[None]:
    """While this is open, what is compiled keeps at most a share `budget` of its activations for backward.

    `torch._functorch.config.activation_memory_budget`, since 2.4; no public spelling.
    """
    if budget == 1.0:
        return contextlib.nullcontext()
    from torch._functorch import config

    return config.patch(activation_memory_budget=budget)  # type: ignore[no-any-return]


NO_FUNCTION_OVERRIDE = torch._C._disabled_torch_function_impl
"""`__torch_function__` of a subclass that looks at operations below autograd only; since 1.7, no public name."""
