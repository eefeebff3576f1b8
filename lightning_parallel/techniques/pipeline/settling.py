"""Training steps that only settle how a module is cut, for searches that measure steps before training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass


class Settled(BaseException):
    """End of a training step before it runs, once it is known how the module is cut; no error that a step handles."""


@dataclass
class Settling:
    """Whether training steps only settle how a module is cut, and what their first one has shown."""

    is_on: bool = False
    forget: Callable[[], None] = lambda: None
    """Forgets what batches have shown: their usual size, and where their losses are computed."""

    def end_step(self) -> None:
        """End a step that was to settle no more than the cut."""
        if self.is_on:
            raise Settled

    @contextlib.contextmanager
    def settled(self) -> Iterator[None]:
        """Inside this context, a training step ends before it runs."""
        self.is_on = True
        try:
            with contextlib.suppress(Settled):
                yield
        finally:
            self.is_on = False
            self.forget()
