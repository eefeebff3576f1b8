"""Looks at the loss behind the first step: whether the mean over ranks is the loss of all samples, and stays it.

A term may come in after a warm-up, and losses that agree at first may be other ones once routers have learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_parallel.module.differences import Tolerance
from lightning_parallel.strategies.compared_copy import ComparedCopy, data_group
from lightning_parallel.strategies.compared_strategy import ComparedStrategy, has_room
from lightning_parallel.strategies.compared_window import ComparedWindow
from lightning_parallel.strategies.loss_over_ranks import LossTrial, looks_at_losses, other_loss, tell_other_layers

_MOST_HELD = 1 << 26
"""Bytes of tensors in attributes up to which a copy is kept through the fit: it would hold them beside the module's."""


class LaterLosses:
    """Looks at the loss of steps 4, 16, 64 and so on, on the copy with which the first step was compared.

    Args:
        strategy: The strategy.
        may_leave_out: Whether nothing is looked at where the copy does not fit beside the module.
    """

    def __init__(self, strategy: ComparedStrategy, *, may_leave_out: bool) -> None:
        self._strategy, self._may_leave_out = strategy, may_leave_out
        self._copy: ComparedCopy | None = None
        self._tolerance = Tolerance(0.0)
        self._before, self._last = 0, 1
        self._written: set[str] = set()
        self._same = 0
        """The last step, counted in this fit, in which the two were the same; 0 where nobody could say."""

    def begin(self, copy: ComparedCopy | None, window: ComparedWindow) -> None:
        """Look at the first step, and keep the copy for later ones. A collective.

        Args:
            copy: The copy; ``None`` if nobody needs it any more.
            window: The first step, which was that of one process.
        """
        group, module = data_group(self._strategy), self._strategy.module
        if group is None or group.size() == 1:
            return
        tell_other_layers(module, group.size())
        if not looks_at_losses(module):
            return
        trial = LossTrial(window.plain, window.expected.loss)
        returns_it = module.automatic_optimization
        words = other_loss(trial, group, window.tolerance, has_gradients=returns_it)
        if words:
            rank_zero_info(words)
        elif copy is not None and copy.short is None and returns_it:
            window.plain.before.restore()  # what the step has left in attributes, such as activations
            copy.plain.empty()
            held = copy.plain.held_bytes()
            if self._goes_on("" if held <= _MOST_HELD else f"its attributes hold {held >> 20} MiB"):
                self._copy, self._tolerance = copy, window.tolerance
                self._written = window.plain.written
                self._before, self._last, self._same = module.trainer.global_step, 1, int(words == "")

    def end(self) -> None:
        """Look at no further steps, and free the copy."""
        self._copy = None

    def look(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Look at the loss of a step before it runs, if it is one of those. A collective then.

        Args:
            args: The arguments of the step.
            kwargs: As `args`.
        """
        copy = self._copy
        if copy is None or (number := copy.strategy.module.trainer.global_step - self._before + 1) < 4 * self._last:
            return
        words = self._words(copy, args, kwargs)
        copy.plain.empty()
        if words:
            before = f". In step {self._before + self._same}, the two were the same" if self._same else ""
            rank_zero_info(f"in step {self._before + number}, {words}{before}")
            self.end()
        self._last, self._same = number, number if words == "" else self._same

    def _words(self, copy: ComparedCopy, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """The loss of a step beside the mean over ranks, in words; empty if they are the same.

        Nothing that fails here ends the fit, which goes on without looking.
        """
        group, reason = data_group(self._strategy), ""
        assert group is not None
        if self._may_leave_out and not has_room(self._strategy):
            reason = "a copy of the module does not fit beside it any more"
        try:
            reason = reason or copy.follow(args, kwargs, numbers_only=True)
        except Exception as error:  # of what a step has left in the place of a buffer
            reason = f"{type(error).__name__}: {error}"
        if not self._goes_on(reason):
            return None
        trial = None
        try:
            plain = copy.steps()
            plain.given, plain.written = deepcopy((args, kwargs)), self._written
            trial = LossTrial(plain, None)
        except Exception as error:  # of a full memory, or of an object of the user's that has no copy
            reason = f"{type(error).__name__}: {error}"
        if not self._goes_on(reason) or trial is None:
            return None
        return other_loss(trial, group, self._tolerance, has_gradients=False)

    def _goes_on(self, reason: str) -> bool:
        """Whether no rank has a `reason` not to look; else none looks from here on. A collective."""
        if self._strategy.reduce_boolean_decision(not reason):
            return True
        rank_zero_info(f"losses of later steps are not looked at: {reason or 'another rank cannot'}")
        self.end()
        return False
