"""Values that layers leave in one run of a part of a step, beside their results: noted, and cleaned up after it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_parallel.module.given_containers import has_containers
from lightning_parallel.module.left_values import TAKEN, Before, LeftValue, LeftValues
from lightning_parallel.module.placeholders import PlaceholderWriteError, placeholders_in
from lightning_parallel.techniques.pipeline.carried import CarriedResults
from lightning_parallel.techniques.pipeline.routing_refusals import counting, writing
from lightning_parallel.techniques.pipeline.shape_inference import InferredShapes
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan
from lightning_parallel.techniques.pipeline.turns import DisorderError


@contextlib.contextmanager
def refusing_writes(path: str, *, is_tried: bool) -> Iterator[None]:
    """Inside this context, a layer that keeps what it computes fits no schedule.

    Args:
        path: The path of the layer, which runs on placeholders.
        is_tried: Whether the run only looks at the step.
    """
    try:
        yield
    except PlaceholderWriteError as error:
        raise (DisorderError([writing(path)]) if is_tried else error) from error


class RunLeavings:
    """The values that layers leave in the run that is going on.

    Args:
        plan: The layers of each stage.
        paths: The paths of the layers, in order.
        rank: This rank of the pipeline.
        left_values: Finds what layers leave.
        carried: Learns of it, so that it is sent to the stage that takes it.
    """

    def __init__(
        self, plan: StagePlan, paths: Sequence[str], rank: int, left_values: LeftValues, carried: CarriedResults
    ) -> None:
        self._plan, self._paths, self._rank = plan, paths, rank
        self._left_values, self._carried = left_values, carried
        self._left: list[tuple[int, Before, list[LeftValue]]] = []

    def run(self, index: int, layer: nn.Module, run: Callable[..., Any], used: Any, given: Any) -> Any:
        """Run a layer of this rank, and note what it leaves for the step.

        Args:
            index: Its number.
            layer: The layer.
            run: Runs it, given its arguments by position and by name.
            used: Its arguments, by position and by name.
            given: As the step has given them.
        """
        if not self._carried.takes_left(index) and not has_containers(given):
            return run(*used)
        before = self._left_values.before(layer, used, given)
        result = run(*used)
        left = before.found()
        if taken := [each.name for each in left if each.key in TAKEN]:
            raise DisorderError([counting(self._paths[index], taken[0])])
        self.note(index, before, left)
        return result

    def note(self, index: int, before: Before, left: list[LeftValue]) -> None:
        """Note what a layer has left.

        Args:
            index: Its number.
            before: What was there before.
            left: What it has left.
        """
        self._carried.note_left(left, layer=index)
        self._left.append((index, before, left))

    def note_inferred(self, index: int, inferred: InferredShapes, *, is_tried: bool) -> None:
        """Note what a layer has left on placeholders.

        Args:
            index: Its number.
            inferred: What has run it.
            is_tried: Whether the run only looks at the step.

        Raises:
            DisorderError: For a layer that counts outside of itself.
        """
        if is_tried and inferred.counted:
            raise DisorderError([counting(self._paths[index], inferred.counted[0])])
        if inferred.left:
            self.note(index, *inferred.left)
            inferred.left = None  # it would hold the step's own lists until the next one

    def end(self, replace: Callable[[Any], Any], *, is_end: bool, is_joined: bool) -> None:
        """Let layers of this rank go on with their own values, and hooks find those of the whole batch.

        Args:
            replace: Returns values with what this stage has received in the place of placeholders.
            is_end: Whether the run has come to the end of the step, which reads lists and clears them.
            is_joined: Whether it was that of the whole batch.
        """
        for index, before, left in self._left[::-1]:
            is_here = self._plan.rank_of(self._plan.stage_at(index)) == self._rank
            inside = [each for each in left if each.is_inside(self._paths[index])]
            outside = [each for each in left if each not in inside]
            if is_here and any(placeholders_in(each.value) for each in inside):
                before.put_back(inside)
            if not is_end:
                before.take_away(outside)
            elif is_joined:
                before.replace(outside, [tree_map_only(Tensor, Tensor.detach, replace(each.value)) for each in outside])
        self._left = []
