"""When ranks are compared while a fit goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

_ALWAYS = 4
"""Steps before each of which ranks are compared; then those whose number is a power of two, up to `_EVERY`."""
_EVERY = 1024
"""From there on, every so many: a comparison takes a pass over the parameters, where a step takes dozens."""


class Looks:
    """Counts steps, and compares what ranks hold or do before some of them: ever more rarely.

    Args:
        module: The module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._num_steps = 0
        self._agreed: int | None = None
        """The number of updates before the latest look that has found nothing."""

    def look(self) -> None:
        """Compare the ranks, if it is time to. A collective then.

        Raises:
            RanksDifferError: What differs, on rank 0, and since when.
        """
        self._num_steps += 1
        step = self._num_steps
        if step <= _ALWAYS or step % _EVERY == 0 or (step < _EVERY and not step & (step - 1)):
            self.compare()

    def compare(self) -> None:
        """Compare the ranks now. A collective.

        Raises:
            RanksDifferError: As `look` raises it.
        """
        raise NotImplementedError
