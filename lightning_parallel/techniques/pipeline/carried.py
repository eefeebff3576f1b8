"""Results of a step that a later stage takes and that no layer between is given, carried from stage to stage.

Stages run the same step, so results outside of the layers have the same numbers on each: the third sum of a stage is
the third sum of every other, as a value or as a placeholder. A trace shows at which position each is computed, and
until which it is used. What crosses a boundary in between is sent along, unless the first layer behind the boundary is
given it anyway. The end of the last layer is a boundary, too, where the rest of the step runs on the whole batch.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.placeholders import Placeholder
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan


@dataclass
class CarriedResult:
    """One result of an operation outside of layers, or of a layer.

    Args:
        made: The position in the step at which it is computed; behind the last layer, the number of layers.
        used: The last position at which it is used, in the same way.
        given: The numbers of the layers that are given it.
        hidden_of: The numbers of the layers whose hidden states it is.
    """

    made: int
    used: int
    given: set[int] = field(default_factory=set)
    hidden_of: set[int] = field(default_factory=set)

    def crosses(self, start: int) -> bool:
        """Whether it has to be sent along to the stage that begins with layer `start`."""
        return self.made < start <= self.used and start not in self.given


Number = tuple[str, int]
"""The name of an operation, and the number of results of its kind before this one."""
Carried = dict[str, dict[Number, CarriedResult]]
"""Name of a step -> number of a result -> the result."""


class CarriedResults:
    """Results that are carried, as traces of steps have shown them, and those of the run that is going on.

    Args:
        plan: The layers of each stage.
        position: Returns where in the step the run is.
        known: Results from traces of an earlier cut.
    """

    def __init__(self, plan: StagePlan, position: Callable[[], int], known: Carried | None = None) -> None:
        self.by_step: Carried = dict(known or {})
        self._end, self._last_start = plan.num_layers, plan.layers_of(plan.last).start
        self._position = position
        self._wanted: dict[Number, CarriedResult] = {}
        self._seen: dict[Number, Tensor] = {}
        self._numbers: dict[int, tuple[Number, Tensor]] = {}  # by `id`; the tensor is kept: no other one gets it
        self._counts = Counter[str]()
        self._is_traced = self._is_numbered = False

    def begin(self, step: str, *, is_traced: bool) -> None:
        """Begin a run of a step.

        Args:
            step: The step's name.
            is_traced: Whether this run is to show which results are carried.
        """
        self.end()
        if is_traced:
            self.by_step[step] = {}
        self._is_traced, self._wanted = is_traced, self.by_step.get(step, {})
        self._is_numbered = is_traced

    def end(self) -> None:
        """End a run, and forget its values; of a trace, only what may have to be carried is kept."""
        if self._is_traced:
            for number, result in list(self._wanted.items()):
                if not any(map(result.crosses, range(result.made + 1, result.used + 1))):
                    del self._wanted[number]
        self._seen, self._numbers, self._wanted, self._counts = {}, {}, {}, Counter()
        self._is_traced = self._is_numbered = False

    @contextlib.contextmanager
    def numbering(self, *, is_on: bool) -> Iterator[None]:
        """Number results inside this context, or do not.

        Args:
            is_on: True while the user's step runs, without what gathers parameters around it; false within a layer.
        """
        before, self._is_numbered = self._is_numbered, is_on
        try:
            yield
        finally:
            self._is_numbered = before

    def note(self, kind: str, result: Any) -> None:
        """Number the tensors that an operation outside of layers, or a layer, has returned.

        Args:
            kind: The operation's name.
            result: What it has returned.
        """
        if not self._is_numbered or not (self._is_traced or self._wanted):
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note((kind, self._counts[kind]), tensor)
                self._counts[kind] += 1

    def _note(self, number: Number, tensor: Tensor) -> None:
        if not self._is_traced:
            if number in self._wanted:
                self._seen[number] = tensor
        # An operation in place returns what has a number already.
        elif isinstance(tensor, Placeholder) and tensor.stage is not None and not self.knows(tensor):
            is_last = number[0] == OF_LAYER and self._position() == self._end - 1  # the stack's own result
            made = self._end if is_last else self._place()
            self._numbers[id(tensor)], self._wanted[number] = (number, tensor), CarriedResult(made, made)

    def knows(self, placeholder: Placeholder) -> bool:
        """Whether, in a trace, a result has a number, by which it can be carried."""
        return id(placeholder) in self._numbers

    def _place(self) -> int:
        """The position, between layers and behind them."""
        position = self._position()
        return self._end if position == self._end - 1 else position

    def use(self, placeholder: Placeholder, *, layer: int | None = None, is_hidden: bool = False) -> bool:
        """Note, in a trace, that a result is used.

        Args:
            placeholder: The result.
            layer: The number of the layer that is given it, if that is its use.
            is_hidden: Whether these are its hidden states.

        Returns:
            Whether it is known, so that it can be carried.
        """
        if not self.knows(placeholder):
            return False
        result = self._wanted[self._numbers[id(placeholder)][0]]
        result.used = max(result.used, self._place() if layer is None else layer)
        if layer is not None:
            result.given.add(layer)
            result.hidden_of |= {layer} if is_hidden else set()
        return True

    def num_crossing(self, step: str, start: int) -> int:
        """Count the results that are sent along to the stage that begins with layer `start`."""
        return sum(result.crosses(start) for result in self.by_step.get(step, {}).values())

    def num_kept(self, step: str) -> int:
        """Count the results that the last stage keeps for the rest of the step on the whole batch."""
        return sum(map(self._is_kept, self.by_step.get(step, {}).values()))

    def crossing(self, start: int) -> list[Tensor]:
        """The results of this run that are sent along to the stage that begins with layer `start`.

        Raises:
            ConfigurationError: If the step has not computed one of them.
        """
        return self._found(lambda result: result.crosses(start))

    def kept(self) -> list[Tensor]:
        """The results of this run that the last stage keeps for the rest of the step on the whole batch.

        Raises:
            ConfigurationError: If the step has not computed one of them.
        """
        return self._found(self._is_kept)

    def _is_kept(self, result: CarriedResult) -> bool:
        """Whether the rest of the step takes it, and it is none of the side inputs with which the last stage begins."""
        is_of_stage = result.made >= self._last_start or self._last_start in result.hidden_of
        return result.crosses(self._end) and is_of_stage

    def _found(self, wanted: Callable[[CarriedResult], bool]) -> list[Tensor]:
        numbers = [number for number, result in sorted(self._wanted.items()) if wanted(result)]
        if missing := [number for number in numbers if number not in self._seen]:
            raise ConfigurationError([_CHANGED.format(missing[0][0])])
        return [self._seen[number] for number in numbers]


OF_LAYER = "a layer"
"""In the place of an operation's name."""
_CHANGED = (
    "the step does not return from {} as often as in the first step, which has shown what passes from stage to stage; "
    "compute the same between layers in each step, or give pipeline=1"
)
