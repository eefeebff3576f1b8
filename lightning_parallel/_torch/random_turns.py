"""Draws from torch's default generators in a thread beside the main one: private names of torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.random
from torch.utils._python_dispatch import TorchDispatchMode


class _TurnMode(TorchDispatchMode):
    """Calls `turn` before each operation that draws from a default generator; of the thread that has entered it."""

    def __init__(self, turn: Callable[[], None]) -> None:
        super().__init__()
        self._turn = turn

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and not _has_own_generator(args, kwargs):
            self._turn()
        return func(*args, **kwargs)


def _has_own_generator(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    found = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Generator)]
    return bool(found) and torch.default_generator not in found


class _GeneratorInTurn:
    """The default generator of the host as `torch.random` uses it; one thread calls `turn` before it does."""

    def __init__(self, own: torch.Generator, turn: Callable[[], None]) -> None:
        self._own, self._turn, self._thread = own, turn, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self._thread:
            self._turn()
        return getattr(self._own, name)


@contextlib.contextmanager
def drawing_in_turn(turn: Callable[[], None]) -> Iterator[None]:
    """Inside this context, this thread calls `turn` before it draws from, reads or seeds the default generators.

    `torch.utils._python_dispatch.TorchDispatchMode`, since 1.12, for what draws: it is on in its own thread alone.
    `torch.random.default_generator`, since 1.1, through which `torch.manual_seed`, `fork_rng`, `get_rng_state` and
    others go, is replaced meanwhile. Both wait for a generator of each thread.

    Args:
        turn: Waits until no other thread draws.
    """
    own = torch.random.default_generator
    ours: Any = _GeneratorInTurn(own, turn)
    torch.random.default_generator = ours
    try:
        with _TurnMode(turn):
            yield
    finally:
        if torch.random.default_generator is ours:
            torch.random.default_generator = own
