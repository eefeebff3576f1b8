"""Hooks, classes and parameters of modules: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def initializer_replaced(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Inside this context, `torch.nn.init.trunc_normal_` samples with ``replace(its own sampling)``.

    Since 2.13 it samples by rejection, in a loop that reads the values, which cannot be recorded operation by
    operation. `torch.nn.init._no_grad_trunc_normal_`, since 1.3; there is no public way to record an initialisation.

    Args:
        replace: From torch's sampling function to the one that is called in its place.
    """
    original = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = replace(original)
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""Where `nn.Module` keeps its hooks: names stable since 2.0; there is no public way to list a module's hooks."""


def called_method(module: nn.Module) -> str:
    """The name of the attribute with which a call of `module` begins that may be replaced.

    After ``module.compile()`` it is `_compiled_call_impl`, since 2.2, inside of which all else is compiled.
    """
    return "forward" if vars(module).get("_compiled_call_impl") is None else "_compiled_call_impl"


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` comes from `torch.compile`, which names its child `_orig_mod`, since 2.0, or compiles itself."""
    return "_orig_mod" in dict(module.named_children()) or vars(module).get("_compiled_call_impl") is not None


def subclass_like(cls: type[nn.Module], forward: Callable[..., Any] | functools.partialmethod[Any]) -> type[nn.Module]:
    """Make a subclass with another `forward` that otherwise prints and reads like the class itself.

    Args:
        cls: The class of a module.
        forward: The method of the subclass.
    """
    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__})


def subclass_calling(cls: type[nn.Module], call: Callable[..., Any]) -> type[nn.Module]:
    """Make a subclass with another `__call__`, around all hooks, that otherwise prints and reads like the class itself.

    Args:
        cls: The class of a module.
        call: The method of the subclass.
    """
    return type(cls.__name__, (cls,), {"__call__": call, "__module__": cls.__module__, "__doc__": cls.__doc__})


def as_parameter(tensor: Tensor) -> Any:
    """Mark `tensor`, of a subclass, as a parameter: the object itself, where `nn.Parameter` might make a copy.

    `nn.Parameter` marks tensors of subclasses with `_is_param`, since 1.12.
    """
    tensor._is_param = True  # type: ignore[attr-defined]
    return tensor
