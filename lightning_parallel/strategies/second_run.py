"""A second run of a first step that differs from one process, to see from which module on it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_parallel.module.differences import value_difference
from lightning_parallel.module.layer_kinds import alike_layers_trusted
from lightning_parallel.module.output_sketches import OutputSketches, first_difference
from lightning_parallel.ranks.objects import of_all_ranks
from lightning_parallel.strategies.compared_strategy import ComparedStrategy
from lightning_parallel.strategies.compared_window import ComparedWindow
from lightning_parallel.strategies.plain_step import StepValues


@dataclass(frozen=True, kw_only=True)
class SecondRun:
    """A step to be run once more, by the module and by its copy.

    Args:
        step: Runs the training step of the parallel module.
        args: Its arguments.
        kwargs: As `args`.
        window: The values of the first run, of the module and of its copy.
        strategy: The strategy.
        layers: Paths of layers inside of which ranks have parts of values.
    """

    step: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    window: ComparedWindow
    strategy: ComparedStrategy
    layers: Collection[str]

    def repeated_differences(self) -> tuple[list[list[str]], str]:
        """The differences of each rank, without logged values that the copy's step does not give twice. A collective.

        The time that a step takes is logged, or something is counted outside of the module: such values prove nothing.

        Returns:
            The differences, and where they come from, if the copy's loss is another one, too; else an empty text.
        """
        window, hint = self.window, ""
        unsteady: list[str] = []
        try:
            values = window.run_again()
        except torch.OutOfMemoryError as error:  # beside what the real step has computed: nothing is known then
            window.plain.failure = f"a plain copy, run again, raised {type(error).__name__}: {error}"
        except Exception as error:  # of the user's code
            hint = f"the plain copy raised {type(error).__name__}: {error}"
        else:
            unsteady = window.unsteady(values)
            if not value_difference(values.loss, window.expected.loss) <= window.tolerance.value:
                hint = "the loss of the plain copy is another one, too: the step reads and changes what no module holds"
        found = of_all_ranks((hint, unsteady, window.plain.failure))
        if any(failure for *_, failure in found):
            return [[] for _ in found], ""
        window.leave_out({name for _, names, _ in found for name in names})
        return of_all_ranks(window.value_differences(window.ours)), next((each for each, *_ in found if each), "")

    def first_difference(self) -> str:
        """The first module whose output differs, in words; empty where that is not known. A collective of all ranks.

        Raises:
            Exception: Whatever the step raises when it runs again, where other ranks may wait in it for this one.
        """
        try:
            verdicts = self._verdicts()
        except Exception:
            if self.strategy.policies_for(self.strategy.module).shards:  # whose ranks wait for each other in a step
                raise
            verdicts = None
        found = of_all_ranks(verdicts)
        known = [each for each in found if each is not None]
        return first_difference(known) if len(known) == len(found) else ""

    def _verdicts(self) -> dict[str, float | None] | None:
        """The distances of outputs by path; ``None`` where a second run has another loss than the first one."""
        window, device, values = self.window, self.strategy.root_device, StepValues()
        plain, tolerance = window.plain, window.tolerance
        own, theirs = OutputSketches(plain.originals, self.layers), OutputSketches(plain.module, self.layers)
        assert window.state is not None
        window.state.restore(device)
        # Compiled code calls no hooks inside of layers.
        as_written, each = torch.compiler.set_stance("force_eager"), alike_layers_trusted(trusted=False)
        with own.taken(), values.of(plain.originals, passes_on=False), as_written, each:
            values.take_loss(self.step(*self.args, **self.kwargs))
        repeated = window.run_again(theirs.taken())
        pairs = [(values.loss, window.ours.loss), (repeated.loss, window.expected.loss)]
        if not all(value_difference(*pair) <= tolerance.value for pair in pairs):
            return None
        return own.verdicts(theirs, tolerance)
