"""The proof with which a fit begins: its first step equals that of one process on a plain copy of the module.

The copy is taken before the module is made parallel. It is given the same batch, from the same random state, and its
gradients are averaged over the ranks that read different samples. Then the real step has to return the same loss, log
the same values, leave metrics in the same states and end with the same gradients, before anything is updated.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from lightning_parallel.errors import ConfigurationError, FirstStepError
from lightning_parallel.errors import check as refuse
from lightning_parallel.module.layer_kinds import alike_layers_trusted
from lightning_parallel.ranks.memory import release_cached
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.strategies.compared_copy import ComparedCopy, copy_of, data_group
from lightning_parallel.strategies.compared_strategy import (
    ComparedStrategy,
    in_words,
    is_reference,
    layers_with_parts,
    shares_samples,
)
from lightning_parallel.strategies.compared_window import ComparedWindow
from lightning_parallel.strategies.later_losses import LaterLosses
from lightning_parallel.strategies.manual_window import ManualWindow
from lightning_parallel.strategies.plain_step import StepValues
from lightning_parallel.strategies.second_run import SecondRun
from lightning_parallel.strategies.trial_step import NotTriedError, TrialStep

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

CHECKS = ("auto", "first_step", "off")
"""Values of the argument `check`."""

_DRAWN = "it draws random numbers (dropout), which ranks that share samples draw for their parts, and differs"


def check_violations(check: str) -> list[str]:
    """Reasons why `check` is no value of that argument; empty if it is one."""
    if check in CHECKS:
        return []
    return [f"check={check!r} is none of {', '.join(map(repr, CHECKS))}"]


class FirstStep:
    """Compares the first accumulation window of a fit with one process; later steps pass by it.

    Where the module does not fit beside itself, a trial step is compared instead, in which both have fewer layers.

    Args:
        strategy: The strategy.
        check: ``"first_step"``; ``"auto"``, with as many layers as fit; ``"off"``.
    """

    def __init__(self, strategy: ComparedStrategy, check: str) -> None:
        refuse(check_violations(check))
        self._strategy = strategy
        self.check = check
        self._copy: ComparedCopy | None = None
        self._window: ComparedWindow | None = None
        self._layers: tuple[str, ...] = ()
        self._listening = ExitStack()
        self._later = LaterLosses(strategy, may_leave_out=check == "auto")
        self.is_paused = False
        """Whether steps are trials, which are undone, and in which memory is measured."""
        self.outcome = ""
        """The result in words; empty where nothing has been said."""
        self.around_plain: Callable[[], AbstractContextManager[object]] = nullcontext
        """Makes a context for each step of a plain copy that has all layers: there, what one process does is seen."""
        self.finest = 0.0
        """The least precision to expect: a module may compute in a coarser dtype than it has."""

    def begin(self, trainer: Trainer) -> None:
        """Copy the module, if it is to be compared. Call it before anything is applied to it."""
        self.end()
        strategy = self._strategy
        is_left = self.check == "off" or trainer.state.fn != TrainerFn.FITTING
        if is_left or is_reference(strategy) or trainer.ckpt_path is not None:
            return
        self._copy, reason = copy_of(strategy, trainer, may_leave_out=self.check == "auto")
        self._layers = layers_with_parts(strategy) if self._agree(reason) else ()

    def _agree(self, reason: str) -> bool:
        """Whether no rank has a `reason` not to compare; else none does, as comparing is a collective. One itself."""
        if self._strategy.reduce_boolean_decision(not reason):
            return True
        self._leave(reason or "another rank cannot")
        return False

    def note(self) -> None:
        """Note the module as the strategy has made it: what changes from here on, the user's hooks change."""
        if self._copy is not None:
            self._copy.plain.note(self._strategy.module)

    def end(self) -> None:
        """Free the copy."""
        self._later.end()
        _close(self._listening, self._copy)
        self._copy = self._window = None

    def run(self, step: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a training step, and compare it if it belongs to the first window. A collective then.

        Args:
            step: Runs the training step of the parallel module.
            args: Its arguments.
            kwargs: As `args`.

        Raises:
            FirstStepError: If its loss, or what it logs or gives to metrics, is not that of one process.
        """
        copy = self._copy
        if not self.is_paused:
            self._later.look(args, kwargs)
        if copy is None or self.is_paused or not self._is_followed(copy, args, kwargs):
            return step(*args, **kwargs)
        if copy.short is not None:
            trial = TrialStep(self._strategy, step, self._agree)
            with copy.shortened(), trial.undone(), suppress(NotTriedError):
                if self._has_plain_step(copy, args, kwargs):
                    trial.run_backward(self._run_compared(copy, trial.run, args, kwargs))
                    self.before_update()
            self.end()
        elif self._has_plain_step(copy, args, kwargs):
            return self._run_compared(copy, step, args, kwargs)
        return step(*args, **kwargs)

    def _run_compared(self, copy: ComparedCopy, step: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> Any:
        """Run a step, and compare what it returns and logs."""
        window, strategy, values = self._window, self._strategy, StepValues()
        assert window is not None
        window.ours, window.state = values, RandomState.take(strategy.root_device)
        is_seen = strategy.reduce_boolean_decision(not window.plain.draws and not window.layers)
        with values.of(strategy.module, passes_on=True), alike_layers_trusted(trusted=is_seen):
            output = step(*args, **kwargs)
        values.take_loss(output)
        values.take_metrics(strategy.module)
        copy.note_step()
        if isinstance(window, ManualWindow):
            self._end_manual(window)
            return output
        again = SecondRun(step=step, args=args, kwargs=kwargs, window=window, strategy=strategy, layers=self._layers)
        self._decide(window.value_differences(values), again)
        return output

    def _end_manual(self, window: ManualWindow) -> None:
        """Compare the rest of a step that updates nothing; another one has been compared before. A collective."""
        if self._window is not window:
            return
        # All ranks alike: one that has seen an update would be here no more.
        if not self._strategy.reduce_boolean_decision(not window.has_missed_update):
            self._leave("the step updates through optimizers that Lightning has not wrapped")
            return
        self._decide(window.steady_differences())

    def _leave(self, reason: str) -> None:
        self.end()
        self._tell(f"first step not compared with one process: {reason}")

    def _tell(self, outcome: str) -> None:
        self.outcome = outcome
        rank_zero_info(outcome)

    def held(self) -> AbstractContextManager[None]:
        """Return a context in which gradients are left as they are on each rank."""
        return nullcontext() if self._window is None else self._window.held()

    def _is_followed(self, copy: ComparedCopy, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether the copy has what the module has now, on all ranks. A collective."""
        return self._agree(copy.follow(args, kwargs)) and (self._window is None or copy.follow_values())

    def _has_plain_step(self, copy: ComparedCopy, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Run the step on the copy. False if some rank could not. A collective."""
        reason = ""
        try:
            self._window = self._window or copy.open_window(finest=self.finest)
            with nullcontext() if copy.short else self.around_plain():
                self._window.take_plain_step(args, kwargs)
        except Exception as error:  # a user's step may raise anything: the real one will, too, or the copy is at fault
            reason = _raised(copy, error)
        return self._agree(reason)

    def before_backward(self, loss: Tensor) -> None:
        """Watch by what the gradient of `loss` is multiplied: by the loss scale, or by weights of a callback."""
        if self._window is not None and not self.is_paused:
            self._window.watch(loss)
            self._listening.enter_context(self._window.of_hooks(self._strategy.module))

    def after_backward(self) -> None:
        """Add the gradients of the copy to those of the window. A collective if hooks see them."""
        self._listening.close()
        if self._window is not None:
            self._window.add_gradients(data_group(self._strategy))

    def before_update(self) -> None:
        """Compare the gradients of the window, and metrics over the ranks. A collective.

        Raises:
            FirstStepError: If they are not those of one process.
        """
        window = self._window
        if window is None or self.is_paused:
            return
        if window.num_backwards == 0:
            if isinstance(window, ManualWindow):
                self._leave("the step calls backward by itself, and not manual_backward")
            return
        found = window.update_differences(data_group(self._strategy))
        if self._agree(window.plain.failure):
            self._decide(found)
        if self._window is not None:
            self._tell(window.summary())
            copy = self._copy
            self.end()
            self._later.begin(copy, window)

    def _decide(self, differences: list[str], again: SecondRun | None = None) -> None:
        """Go on if no rank has found a difference. A collective.

        Args:
            differences: Those of this rank.
            again: The step, to see where it begins to differ.

        Raises:
            FirstStepError: In words on rank 0, which may not be the rank that has found it.
        """
        strategy, window = self._strategy, self._window
        assert window is not None
        found, hint = of_all_ranks(differences), ""
        if not any(found):
            return
        strategy.steps.check_calls()
        # Ranks that read different samples may differ in that, too.
        if any(of_all_ranks(shares_samples(strategy) and window.plain.draws)):
            self._leave(_DRAWN)
            return
        if again is not None:
            found, hint = again.repeated_differences()
            if not any(found):
                return
        self.end()
        rank, first = next((rank, each) for rank, each in enumerate(found) if each)
        raise _error(strategy, first, rank, hint or _where(again, first))


def _error(strategy: ComparedStrategy, differences: Sequence[str], rank: int, where: str) -> FirstStepError:
    if strategy.global_rank != 0:
        return FirstStepError("the first step differs from one process; rank 0 says how")
    return FirstStepError(in_words(strategy, differences, rank, where))


def _close(listening: ExitStack, copy: ComparedCopy | None) -> None:
    listening.close()
    if copy is not None:
        copy.close()


def _raised(copy: ComparedCopy, error: Exception) -> str:
    traceback.clear_frames(error.__traceback__)  # what the step has computed: it may have been too much
    with suppress(RuntimeError):  # of a device that has failed, which the real step meets, too
        release_cached(copy.strategy.root_device)
    layers = f" with {copy.short}" if copy.short else ""
    return f"a plain copy of the module{layers} raised {type(error).__name__}: {error}"


def _where(again: SecondRun | None, differences: Sequence[str]) -> str:
    """The module from which on a step differs, in words; empty where nobody knows. A collective."""
    if again is None:
        return ""
    # First of all: should the second run fail, or never end, this has been said.
    rank_zero_info(f"first step differs from one process: {'; '.join(differences)}. It runs once more, to see where")
    try:
        return again.first_difference()
    except ConfigurationError as error:  # of a layer that was run as another one of its kind until now
        return "; ".join(error.violations)
    except Exception:  # where others wait for this rank, its own error, which comes now, ends them
        return ""
