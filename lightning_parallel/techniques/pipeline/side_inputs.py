"""Tensors that pass from stage to stage beside hidden states: other arguments of layers that depend on parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.techniques.pipeline.execution import MOST_DIMS, PASSED_DTYPES
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan

Beside = dict[str, dict[int, tuple[int, ...]]]
"""Name of a step -> layer -> which of the tensors that it is given were computed with parameters, by place."""
_OUTSIDE = -1
"""In the place of a layer: whether operations outside of layers take what was received."""


class SideInputs:
    """Which arguments of the layers pass from stage to stage, as traces of steps have shown.

    Args:
        plan: Which layers are which stage.
        paths: The paths of the layers, in order.
        known: What traces of an earlier cut have shown.
    """

    def __init__(self, plan: StagePlan, paths: Sequence[str], known: Beside | None = None) -> None:
        self.by_step: Beside = dict(known or {})
        self._plan, self._paths = plan, paths

    def has_any(self, step: str) -> bool:
        """Whether anything passes in a step."""
        return any(self.by_step.get(step, {}).values())

    def num_passed(self, step: str, stage: int) -> int:
        """How many tensors `stage` receives in a step, hidden states included."""
        return 1 + len(self.by_step.get(step, {}).get(self._plan.layers_of(stage).start, ()))

    def note(self, step: str, index: int, hidden: Any, args: Any, kwargs: Any) -> list[Any]:
        """Note, in a trace, which arguments of layer `index` were computed with parameters; returns these."""
        leaves = tree_leaves((args, kwargs))
        places = [
            p for p, leaf in enumerate(leaves) if leaf is not hidden and is_placeholder(leaf) and leaf.stage is not None
        ]
        self.by_step[step][index] = tuple(places)
        return [leaves[place] for place in places]

    def note_outside(self, step: str) -> None:
        """Note, in a trace, that operations outside of layers take what was received."""
        self.by_step[step][_OUTSIDE] = (0,)

    def find(self, step: str, index: int, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that pass beside hidden states where layer `index` is called.

        Raises:
            ConfigurationError: If the layer is given other arguments than in the trace.
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
                    "passes from stage to stage; give the same in each step, or pipeline=1"
                ]
            )
        return found

    def check_kind(self, index: int, placeholder: Any) -> None:
        """Refuse a tensor that cannot be sent to the stage of layer `index`."""
        if placeholder.dtype not in PASSED_DTYPES or placeholder.ndim > MOST_DIMS:
            raise ConfigurationError(
                [
                    f"{self._paths[index]} is given a tensor of {placeholder.dtype} with {placeholder.ndim} dimensions "
                    f"that another pipeline stage computes; {', '.join(map(str, PASSED_DTYPES))} of at most "
                    f"{MOST_DIMS} dimensions pass. Give another, or pipeline=1"
                ]
            )
