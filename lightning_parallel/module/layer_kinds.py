"""Layers that compute alike, of which one is compared with itself in place of all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import nn

_ARE_TRUSTED: ContextVar[bool | None] = ContextVar("alike_layers_trusted", default=None)


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """The class of a layer, and the settings by which layers of one class may compute differently; not its number."""
    return type(layer), *(
        (path, type(child), name, value)
        for path, child in layer.named_modules()
        for name, value in sorted(vars(child).items())
        if isinstance(value, int | float | str | None)
        and name != "training"
        and not name.endswith(("idx", "index", "layer_id"))
    )


@contextlib.contextmanager
def alike_layers_trusted(*, trusted: bool) -> Iterator[None]:
    """A context in which layers of a kind that was compared with itself are run as that one, or each is compared.

    Args:
        trusted: Whether the step as a whole is compared with one process; not where it was, and differs.
    """
    token = _ARE_TRUSTED.set(trusted)
    try:
        yield
    finally:
        _ARE_TRUSTED.reset(token)


def are_alike_layers_trusted() -> bool | None:
    """Whether a layer may be run as one of its kind; ``None`` where those that are need no other comparison."""
    return _ARE_TRUSTED.get()
