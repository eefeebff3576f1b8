"""Results of a step that a later stage takes and that no layer between is given, carried from stage to stage.

Stages run the same step, so a result is known by the lines of code that lead to it, and by its number among those that
the same lines have had before: on one stage it is a value, on another one a placeholder. A trace shows at which
position each is computed, and until which it is used. What crosses a boundary in between is sent along, unless the
first layer behind the boundary is given it anyway. The end of the last layer is a boundary, too, where the rest of the
step runs on the whole batch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.left_values import LeftValue
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


Lines = tuple[tuple[str, int], ...]
"""Names of functions and numbers of lines, from what has returned a result up to the step."""
Key = tuple[Lines, int]
"""The lines that lead to a result, and the number of results that they have had before it in the same step."""
Carried = dict[str, dict[Key, CarriedResult]]
"""Name of a step -> key of a result -> the result."""


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
        self._wanted: dict[Key, CarriedResult] = {}
        self._seen: dict[Key, Tensor] = {}
        self._keys: dict[int, tuple[Key, Tensor]] = {}  # by `id`; the tensor is kept, so that no other one gets it
        self._counts = Counter[Lines]()
        self._is_traced = self._is_noting = False

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
        self._is_noting = is_traced

    def end(self) -> None:
        """End a run, and forget its values; of a trace, only what may have to be carried is kept."""
        if self._is_traced:
            for key, result in list(self._wanted.items()):
                if not any(map(result.crosses, range(result.made + 1, result.used + 1))):
                    del self._wanted[key]
        self._seen, self._keys, self._wanted, self._counts = {}, {}, {}, Counter()
        self._is_traced = self._is_noting = False

    @contextlib.contextmanager
    def noting(self, *, is_on: bool) -> Iterator[None]:
        """Note results inside this context, or do not.

        Args:
            is_on: True while the user's step runs, without what gathers parameters around it; false within a layer.
        """
        before, self._is_noting = self._is_noting, is_on
        try:
            yield
        finally:
            self._is_noting = before

    def note(self, result: Any, *, layer: int | None = None) -> None:
        """Note the tensors that an operation outside of layers, or a layer, has returned.

        Args:
            result: What it has returned.
            layer: The number of the layer.
        """
        if not self._is_noting or not (self._is_traced or self._wanted):
            return
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        lines = () if not tensors else lines_of_step() if layer is None else ((_RETURNED, layer),)
        for tensor in tensors:
            self._note((lines, self._counts[lines]), tensor, self._end if layer == self._end - 1 else None)
            self._counts[lines] += 1

    def takes_left(self, layer: int) -> bool:
        """Whether the step takes what a layer leaves elsewhere than in its result.

        Args:
            layer: The number of the layer.
        """
        return any(lines[:1] == ((_LEFT, layer),) for lines, _ in self._wanted)

    def note_left(self, left: Iterable[LeftValue], *, layer: int) -> None:
        """Note what a layer has left elsewhere than in its result.

        Args:
            left: The values.
            layer: The number of the layer.
        """
        for each in left if self._is_traced or self._wanted else ():
            lines = ((_LEFT, layer), (each.name, 0))
            for tensor in tree_leaves(each.value):
                if isinstance(tensor, Tensor):
                    self._note((lines, self._counts[lines]), tensor, layer)
                    self._counts[lines] += 1

    def name_of_layer(self, placeholder: Any) -> str | None:
        """Words for what a layer has returned or left in this run; ``None`` for anything else."""
        key = next((key for key, tensor in self._seen.items() if tensor is placeholder), None)
        if key is None or (key[0][:1] and key[0][0][0] not in (_LEFT, _RETURNED)):
            return None
        (_, layer), *names = key[0]
        return names[0][0] if names else f"what layer {layer} of the stack returns"

    def _note(self, key: Key, tensor: Tensor, made: int | None = None) -> None:
        if not self._is_traced:
            if key in self._wanted:
                self._seen[key] = tensor
        # An operation in place returns what has a key already.
        elif isinstance(tensor, Placeholder) and tensor.stage is not None and not self.knows(tensor):
            made = self._place() if made is None else made
            self._keys[id(tensor)], self._wanted[key] = (key, tensor), CarriedResult(made, made)

    def knows(self, placeholder: Placeholder) -> bool:
        """Whether, in a trace, a result has a key, by which it can be carried."""
        return id(placeholder) in self._keys

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
        result = self._wanted[self._keys[id(placeholder)][0]]
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
        keys = [key for key, result in sorted(self._wanted.items()) if wanted(result)]
        if missing := [key for key in keys if key not in self._seen]:
            raise ConfigurationError([_CHANGED.format(" in ".join(name for name, _ in missing[0][0][:4]))])
        return [self._seen[key] for key in keys]


def lines_of_step() -> Lines:
    """The lines of code that the step has reached at present, the innermost first, up to where the package calls it."""
    frame, found = inspect.currentframe(), []
    while frame is not None and _is_of_package(frame):
        frame = frame.f_back
    while frame is not None and not _is_of_package(frame):
        if frame.f_globals.get("__name__") != _CALLING_MODULES:
            found.append((frame.f_code.co_name, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _is_of_package(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("lightning_parallel.")


_RETURNED, _LEFT = "a layer", "leavings"
"""In the place of names of functions: what a layer has returned, and what it has left at the place that follows."""
_CALLING_MODULES = "torch.nn.modules.module"
"""Left out of lines: a module is called by other lines where it has hooks, as on the stage that shards it."""
_CHANGED = (
    "the step does not compute what it has in the first step, which has shown what passes from stage to stage: {}. "
    "Compute the same between layers in each step, or give schedule='turns' or pipeline=1"
)
