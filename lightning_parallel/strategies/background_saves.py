"""Checkpoints that are written in the background, from copies in host memory, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning_parallel.strategies.failures import FailureWatch

FORMS = ("auto", "whole", "sharded", "async", "async-whole", "async-sharded")
"""Values of the argument `checkpoint`."""
_BACKGROUND = "async"

Outcome = tuple[str, Exception | None]
"""The reason why a checkpoint could not be written, the same on all ranks, "" if it is; and this rank's exception."""


class Exchange(Protocol):
    """A way in which ranks hear of each other while they write, as long as it takes."""

    def hear_all(self, own: bytes) -> list[bytes]:
        """The words of all ranks on rank 0, nothing on others. A collective."""

    def said_by_first(self, own: str) -> str:
        """The words of rank 0, on all ranks. A collective."""


Job = Callable[[Exchange], Outcome]
"""The rest of a save once all that it needs is planned and copied."""


def form_of(checkpoint: str) -> str:
    """The form that a value of `checkpoint` names: ``"auto"``, ``"whole"`` or ``"sharded"``."""
    return checkpoint.removeprefix(_BACKGROUND).removeprefix("-") or "auto"


def is_in_background(checkpoint: str) -> bool:
    """Whether a value of `checkpoint` lets training go on meanwhile."""
    return checkpoint.startswith(_BACKGROUND)


@dataclass(frozen=True)
class BackgroundExchange:
    """The words of ranks on one save, in the store: nothing that training does is waited for, and it waits for nothing.

    Args:
        failures: Holds the store.
        name: The name of this save, the same on all ranks.
    """

    failures: FailureWatch
    name: str

    def hear_all(self, own: bytes) -> list[bytes]:
        """The words of all ranks on rank 0, nothing on others. A collective."""
        heard = self.failures.hear(own, self.name)
        return [own] if heard is None else heard

    def said_by_first(self, own: str) -> str:
        """The words of rank 0, on all ranks. A collective."""
        heard = self.failures.say(own, self.name)
        return own if heard is None else heard


_LOST = (
    "the checkpoint {} could not be written: {}: {}. Let training go on without it: on_save_error='warn', or give "
    "checkpoint='auto', which waits until it is there"
)


class BackgroundSave:
    """One checkpoint that is being written.

    Args:
        job: Writes it.
        exchange: How ranks hear of each other.
        path: Where it is going to be.
    """

    def __init__(self, job: Job, exchange: BackgroundExchange, path: Any) -> None:
        self.path, self.name = path, exchange.name
        self.outcome: Outcome = "", None
        self._job, self._exchange = job, exchange
        self._thread = threading.Thread(target=self._run, daemon=True, name="checkpoint")
        self._thread.start()

    def _run(self) -> None:
        try:
            self.outcome = self._job(self._exchange)
        except Exception as error:  # the store has ended with rank 0, or the job is at fault
            self.outcome = _LOST.format(self.path, type(error).__name__, error), error

    @property
    def is_over(self) -> bool:
        """Whether it has been written, or could not be."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> Outcome:
        """Its outcome, when it is over.

        Args:
            seconds: How long to wait at most; as long as it takes by default.
        """
        self._thread.join(seconds)
        return self.outcome
