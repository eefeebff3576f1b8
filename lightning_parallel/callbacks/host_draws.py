"""Python's and NumPy's default generators, which have no turns: a look at whether two threads have drawn from them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.random_streams import RandomState


class HostDraws:
    """Looks at the generators whenever the main thread asks for a batch and has it.

    Where they have changed while the thread was reading, nobody knows which of the two threads has drawn, and the order
    of the numbers may not be that of one thread. Where they have not, neither has drawn.

    Args:
        of_steps: The state from which the next step draws where that is another one.
    """

    def __init__(self, of_steps: Callable[[], RandomState | None] = lambda: None) -> None:
        self._of_steps = of_steps
        self._noted: Any = None
        self.is_drawn_by_training = False
        """Whether the main thread draws from them between batches."""

    def look(self) -> bool:
        """Whether a thread has drawn since the last look; not where this is the first."""
        before, self._noted = self._noted, self._state()
        return before is not None and before != self._noted

    def tell(self, *, has_read: bool) -> None:
        """Take it that the main thread has drawn.

        Args:
            has_read: Whether the other thread has read meanwhile.

        Raises:
            ConfigurationError: If it has, so that nobody knows.
        """
        if has_read:
            raise ConfigurationError([_DRAWN])
        self.is_drawn_by_training = True

    def _state(self) -> Any:
        states = [(random.getstate(), np.random.get_state())]
        if (own := self._of_steps()) is not None:
            states.append((own.python, own.numpy))
        return [(python, _plain(numpy)) for python, numpy in states]


def has_drawn(before: RandomState, after: RandomState) -> bool:
    """Whether any default generator has been drawn from between two states."""
    devices = [(state.host, state.device) for state in (before, after)]
    same = all(
        (one is None and other is None) or (one is not None and other is not None and one.equal(other))
        for one, other in zip(*devices, strict=True)
    )
    return not (same and before.python == after.python and _plain(before.numpy) == _plain(after.numpy))


def _plain(numpy: Any) -> tuple[Any, ...]:
    """A state of NumPy's generator, which can be compared."""
    name, keys, *rest = numpy
    return name, keys.tobytes(), *rest


_DRAWN = (
    "DevicePrefetch: while a batch was read ahead, Python's or NumPy's default generator was drawn from, by the data "
    "set or by the training, and the order of the draws may no longer be that without a thread. Draw in workers "
    "(DataLoader(num_workers=1) or more) or from a generator that the data set keeps for itself, or leave "
    "DevicePrefetch out"
)
