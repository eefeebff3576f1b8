"""A second run of a first step that differs from one process, to see from which module on it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.module.differences import Tolerance, value_difference
from lightning_parallel.module.output_sketches import OutputSketches, first_difference
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.strategies.plain_step import PlainSteps, StepValues


@dataclass(frozen=True, kw_only=True)
class SecondRun:
    """A step to be run once more, by the module and by its copy.

    Args:
        step: Runs the training step of the parallel module.
        args: Its arguments.
        kwargs: As `args`.
        plain: The steps of the copy.
        ours: What the first run of the module has returned.
        expected: The same of the copy.
        state: The random state before the first run.
        device: The device of both.
        waits: Whether ranks wait for each other in the midst of a step.
        layers: Paths of layers inside of which ranks have parts of values.
        tolerance: How far outputs may be apart.
    """

    step: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    plain: PlainSteps
    ours: StepValues
    expected: StepValues
    state: RandomState
    device: torch.device
    waits: bool
    layers: Collection[str]
    tolerance: Tolerance

    def first_difference(self) -> str:
        """The first module whose output differs, in words; empty where that is not known. A collective of all ranks.

        Raises:
            Exception: Whatever the step raises when it runs again, where other ranks may wait in it for this one.
        """
        try:
            verdicts = self._verdicts()
        except Exception:
            if self.waits:
                raise
            verdicts = None
        found = [verdicts]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found *= dist.get_world_size()
            dist.all_gather_object(found, verdicts)
        known = [each for each in found if each is not None]
        return first_difference(known) if len(known) == len(found) else ""

    def _verdicts(self) -> dict[str, float | None] | None:
        """The distances of outputs by path; ``None`` where a second run has another loss than the first one."""
        plain, values = self.plain, StepValues()
        own, theirs = OutputSketches(plain.originals, self.layers), OutputSketches(plain.module, self.layers)
        self.state.restore(self.device)
        # Compiled code calls no hooks inside of layers.
        with own.taken(), values.of(plain.originals, passes_on=False), torch.compiler.set_stance("force_eager"):
            values.take_loss(self.step(*self.args, **self.kwargs))
        self.state.restore(self.device)
        with theirs.taken():
            repeated = plain.run_forward(self.args, dict(self.kwargs))
        pairs = [(values.loss, self.ours.loss), (repeated.loss, self.expected.loss)]
        if not all(value_difference(*pair) <= self.tolerance.value for pair in pairs):
            return None
        return own.verdicts(theirs, self.tolerance)
