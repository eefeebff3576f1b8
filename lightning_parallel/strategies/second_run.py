"""A second run of a first step that differs from one process, to see from which module on it does."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lightning_parallel.module.differences import value_difference
from lightning_parallel.module.output_sketches import OutputSketches, first_difference
from lightning_parallel.ranks.random_streams import RandomState
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
        state: The random state before it.
        strategy: The strategy.
        layers: Paths of layers inside of which ranks have parts of values.
    """

    step: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    window: ComparedWindow
    state: RandomState
    strategy: ComparedStrategy
    layers: Collection[str]

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
        found = [verdicts]
        if dist.is_initialized() and dist.get_world_size() > 1:
            found *= dist.get_world_size()
            dist.all_gather_object(found, verdicts)
        known = [each for each in found if each is not None]
        return first_difference(known) if len(known) == len(found) else ""

    def _verdicts(self) -> dict[str, float | None] | None:
        """The distances of outputs by path; ``None`` where a second run has another loss than the first one."""
        window, device, values = self.window, self.strategy.root_device, StepValues()
        plain, tolerance = window.plain, window.tolerance
        own, theirs = OutputSketches(plain.originals, self.layers), OutputSketches(plain.module, self.layers)
        self.state.restore(device)
        # Compiled code calls no hooks inside of layers.
        with own.taken(), values.of(plain.originals, passes_on=False), torch.compiler.set_stance("force_eager"):
            values.take_loss(self.step(*self.args, **self.kwargs))
        self.state.restore(device)
        with theirs.taken():
            repeated = plain.run_forward(self.args, dict(self.kwargs))
        pairs = [(values.loss, window.ours.loss), (repeated.loss, window.expected.loss)]
        if not all(value_difference(*pair) <= tolerance.value for pair in pairs):
            return None
        return own.verdicts(theirs, tolerance)
