"""A training step that is tried, with its backward, and undone."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lightning_parallel.module.kept_state import KeptState
from lightning_parallel.ranks.random_streams import unchanged_generators
from lightning_parallel.strategies.compared_strategy import ComparedStrategy
from lightning_parallel.strategies.plain_step import QuietTrainer
from lightning_parallel.strategies.step_logs import StepLogs
from lightning_parallel.techniques.sharding import abandon_step


class NotTriedError(Exception):
    """The step has raised an error on some rank, and has been given up on all."""


class TrialStep:
    """A step of the parallel module that leaves nothing behind.

    Args:
        strategy: The strategy.
        step: Runs the training step.
        agree: Takes the reason to give up, empty without any; whether no rank has one. A collective.

    Example:
        >>> with trial.undone():
        ...     trial.run_backward(trial.run(batch, 0))
    """

    def __init__(self, strategy: ComparedStrategy, step: Callable[..., Any], agree: Callable[[str], bool]) -> None:
        self._strategy, self._step, self._agree = strategy, step, agree

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """When this closes, the module is what it was, but for an error that ends the run. A collective then."""
        strategy, module = self._strategy, self._strategy.module
        kept, trainer = KeptState(module), module.trainer
        with strategy.steps.tried():
            module.trainer = QuietTrainer(trainer, {})  # type: ignore[assignment]
            try:
                with (
                    unchanged_generators(strategy.root_device),
                    StepLogs(module).of(0),
                    contextlib.redirect_stdout(io.StringIO()),
                ):
                    yield
            finally:
                module.trainer = trainer
                kept.restore()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the step, of copies of its arguments, which it may change.

        Raises:
            NotTriedError: On all ranks, after an error on one.
        """
        return self._all_or_none(lambda: self._step(*copy.deepcopy(args), **copy.deepcopy(kwargs)))

    def run_backward(self, output: Any) -> None:
        """Go backward as Lightning does, with the hooks of the module.

        Args:
            output: Of `run`.

        Raises:
            NotTriedError: As `run`.
        """
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor):
            self._all_or_none(lambda: self._backward(loss))

    def _backward(self, loss: Tensor) -> None:
        strategy, module = self._strategy, self._strategy.module
        loss = loss / module.trainer.accumulate_grad_batches
        strategy.steps.after_forward()
        strategy.pre_backward(loss)
        module.on_before_backward(loss)
        module.backward(loss)
        module.on_after_backward()
        strategy.post_backward(loss)

    def _all_or_none(self, run: Callable[[], Any]) -> Any:
        reason, result = "", None
        try:
            result = run()
        except Exception as error:  # what has fewer layers may fail where the whole module does not
            abandon_step(self._strategy.module)
            reason = f"a trial with fewer layers raised {type(error).__name__}: {error}"
        if not self._agree(reason):
            raise NotTriedError
        return result
