"""The modules that a module holds, in attributes and also in plain containers, where torch does not register them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn


def held_modules(module: nn.Module) -> dict[str, nn.Module]:
    """All modules in `module`, by path: registered ones, and those in lists, tuples and dicts among its attributes.

    A list of metrics is not registered, and trains nothing, but what it holds changes in a step.

    Args:
        module: Any module. Only its own attributes are searched for containers, not those of its submodules.
    """
    found = dict(module.named_modules())
    known = set(found.values())
    for name, value in vars(module).items():
        if isinstance(value, list | tuple | dict) and name not in _REGISTERED and name not in _HOOKS:
            for path, plain in modules_in(name, value, depth=3):
                for below, child in plain.named_modules(prefix=path):
                    if child not in known:
                        known.add(child)
                        found[below] = child
    return found


_EMPTY = vars(nn.Module())
_REGISTERED = ("_parameters", "_buffers", "_modules")
_HOOKS = {name for name in _EMPTY if "hook" in name}


def modules_in(path: str, value: Any, *, depth: int) -> Iterator[tuple[str, nn.Module]]:
    """The modules in nested lists, tuples and dicts, by path; not those in modules.

    Args:
        path: Where the value is.
        value: A module, or a container.
        depth: How many containers in one another are searched.
    """
    if isinstance(value, nn.Module):
        yield path, value
    elif depth and isinstance(value, list | tuple):
        for index, entry in enumerate(value):
            yield from modules_in(f"{path}[{index}]", entry, depth=depth - 1)
    elif depth and isinstance(value, dict):
        for key, entry in value.items():
            yield from modules_in(f"{path}[{key!r}]", entry, depth=depth - 1)
