"""Side inputs: tensors beside hidden states that depend on parameters, and are sent from stage to stage.

They are arguments of the first layer of a stage, and what is carried past it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.pipeline.carried import Carried, CarriedResults
from lightning_parallel.techniques.pipeline.passed_forms import MOST_DIMS, PASSED_DTYPES
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan

Beside = dict[str, dict[int, tuple[int, ...]]]
"""Name of a step -> number of a layer -> places of those of its arguments that were computed with parameters."""
_OUTSIDE = -1
"""Key in the place of a layer's number: operations outside of layers take received tensors."""


@dataclass(frozen=True)
class Traced:
    """Findings of the traces of steps, which hold for any stages.

    Args:
        beside: Arguments of layers.
        carried: Results that pass layers by.
    """

    beside: Beside
    carried: Carried


class SideInputs:
    """Side inputs of the layers, as traces of steps have shown them.

    Args:
        plan: The layers of each stage.
        paths: The paths of the layers, in order.
        position: Returns where in a step a run is.
        known: Side inputs from traces of an earlier cut.
    """

    def __init__(
        self, plan: StagePlan, paths: Sequence[str], position: Callable[[], int], known: Traced | None = None
    ) -> None:
        self.by_step: Beside = dict(known.beside if known is not None else {})
        self.carried = CarriedResults(plan, position, None if known is None else known.carried)
        self._plan, self._paths = plan, paths

    @property
    def traced(self) -> Traced:
        """The findings of traces so far."""
        return Traced(self.by_step, self.carried.by_step)

    def has_any(self, step: str) -> bool:
        """Whether a step has side inputs."""
        return any(self.by_step.get(step, {}).values()) or bool(self.carried.by_step.get(step))

    def num_passed(self, step: str, stage: int) -> int:
        """Count the tensors that a stage receives in a step, hidden states included.

        Args:
            step: The step's name.
            stage: The stage's number.
        """
        start = self._plan.layers_of(stage).start
        return 1 + len(self.by_step.get(step, {}).get(start, ())) + self.carried.num_crossing(step, start)

    def num_beside(self, step: str) -> int:
        """Count the tensors that the last stage has received in a step, or keeps of its own, beside hidden states.

        Args:
            step: The step's name.
        """
        return self.num_passed(step, self._plan.last) - 1 + self.carried.num_kept(step)

    def note(self, step: str, index: int, hidden: Any, args: Any, kwargs: Any) -> list[Any]:
        """Note, in a trace, which arguments of a layer were computed with parameters.

        Args:
            step: The step's name.
            index: The layer's number.
            hidden: Hidden states, which are sent anyway.
            args: Arguments of the layer.
            kwargs: Those by name.

        Returns:
            These arguments.
        """
        leaves = tree_leaves((args, kwargs))
        places = [
            p for p, leaf in enumerate(leaves) if leaf is not hidden and is_placeholder(leaf) and leaf.stage is not None
        ]
        self.by_step[step][index] = tuple(places)
        return [leaves[place] for place in places]

    def note_outside(self, step: str) -> None:
        """Note, in a trace, that operations outside of layers take received tensors."""
        self.by_step[step][_OUTSIDE] = (0,)

    def find(self, step: str, index: int, args: Any, kwargs: Any) -> list[Tensor]:
        """Find the side inputs with which a stage begins: arguments of its first layer, then what is carried past it.

        Args:
            step: The step's name.
            index: The layer's number.
            args: Arguments of the layer.
            kwargs: Those by name.

        Raises:
            ConfigurationError: If the layer is given other arguments than in the trace, or the step computes others.
        """
        leaves = tree_leaves((args, kwargs))
        places = self.by_step.get(step, {}).get(index, ())
        found = [
            leaf for leaf in (leaves[place] for place in places if place < len(leaves)) if isinstance(leaf, Tensor)
        ]
        if len(found) != len(places):
            raise ConfigurationError(
                [
                    f"{self._paths[index]} is given other arguments than in the first step, which has shown what "
                    "passes from stage to stage; give the same in each step, or schedule='turns' or pipeline=1"
                ]
            )
        return found + self.carried.crossing(index)

    def check_kind(self, index: int, placeholder: Any) -> None:
        """Refuse a tensor that cannot be sent to the stage of a layer.

        Args:
            index: The layer's number.
            placeholder: The tensor.

        Raises:
            ConfigurationError: For a dtype or a number of dimensions that is not sent.
        """
        if placeholder.dtype not in PASSED_DTYPES or placeholder.ndim > MOST_DIMS:
            raise ConfigurationError(
                [
                    f"{self._paths[index]} is given a tensor of {placeholder.dtype} with {placeholder.ndim} dimensions "
                    f"that another pipeline stage computes; {', '.join(map(str, PASSED_DTYPES))} of at most "
                    f"{MOST_DIMS} dimensions pass. Give another, or schedule='turns' or pipeline=1"
                ]
            )
