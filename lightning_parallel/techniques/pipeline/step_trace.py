"""A trace of one step on placeholders, which shows what passes from stage to stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.hidden_states import hidden_in
from lightning_parallel.module.placeholders import Placeholder, Watch, is_placeholder, placeholder_like
from lightning_parallel.techniques.pipeline.routing_refusals import foreign, plain_hidden
from lightning_parallel.techniques.pipeline.side_inputs import SideInputs
from lightning_parallel.techniques.pipeline.stage_plan import StagePlan
from lightning_parallel.techniques.pipeline.substitution import Substitutes


class StepTrace:
    """Eyes on a step that runs on placeholders.

    Args:
        step: The step's name.
        plan: The layers of each stage.
        paths: The paths of the layers, in order.
        side_inputs: Learns what passes beside hidden states.
        substitutes: Gets what stands for a tensor once a later stage has received it.
        where: Returns the position in the step, and whether a layer is running.
        touch: Called with the name of a parameter for each operation that takes it.
    """

    def __init__(
        self,
        step: str,
        plan: StagePlan,
        paths: Sequence[str],
        *,
        side_inputs: SideInputs,
        substitutes: Substitutes,
        where: Callable[[], tuple[int, bool]],
        touch: Callable[[str], None],
    ) -> None:
        self._step, self._plan, self._paths = step, plan, paths
        self._side_inputs, self._substitutes, self._where = side_inputs, substitutes, where
        self.watch = Watch(
            lambda: plan.stage_at(where()[0]),
            touch,
            self._refuse,
            is_at_end=lambda: where() == (plan.num_layers - 1, False),
        )

    def look_at_layer(self, index: int, args: Any, kwargs: Any) -> Any:
        """Note what a layer is given; if it begins a stage, what depends on parameters is sent to it.

        Args:
            index: The layer's number.
            args: Its arguments.
            kwargs: Those by name.

        Returns:
            The arguments as its stage has them.
        """
        hidden, stage = hidden_in(args, kwargs), self._plan.stage_at(index)
        beside = self._side_inputs.note(self._step, index, hidden, args, kwargs)
        begins_stage = index == self._plan.layers_of(stage).start
        given, use = self._computed(args, kwargs), self._side_inputs.carried.use
        known = {id(leaf) for leaf in given if use(leaf, layer=index, is_hidden=leaf is hidden)}
        if not begins_stage:
            self._bring(args, kwargs, stage)
            return self._substitutes.replace((args, kwargs))
        # From here on, these tensors count as received by this stage.
        for placeholder in beside if stage else ():
            is_sent = self._substitutes.replace(placeholder).stage == stage - 1
            if not is_sent and id(placeholder) not in known:  # stages between would have to pass it on
                self._refuse(placeholder)
            self._side_inputs.check_kind(index, placeholder)
        for placeholder in (plain_hidden(self._paths[index], hidden), *beside):
            self._substitutes.put(placeholder, placeholder_like(placeholder, watch=self.watch, stage=stage))
        return self._substitutes.replace((args, kwargs))

    def look_outside(self, values: Any) -> Any:
        """Return what an operation outside of layers is given, as the stage at this point of the step has it.

        Args:
            values: What it is given.
        """
        position, is_in_layer = self._where()
        if is_in_layer:
            return self._substitutes.replace(values)
        self._bring(values[0], values[1], self._plan.stage_at(position))
        found = self._substitutes.replace(values)
        if any(before is not after for before, after in zip(tree_leaves(values), tree_leaves(found), strict=True)):
            self._side_inputs.note_outside(self._step)
        return found

    def note(self, values: Any, result: Any) -> None:
        """Note what an operation outside of layers has used, unless it has only looked at a shape or the like.

        Args:
            values: What it was given.
            result: What it has returned.
        """
        if not self._where()[1] and (result is None or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))):
            for placeholder in self._computed(*values):
                self._side_inputs.carried.use(placeholder)

    def _bring(self, args: Any, kwargs: Any, stage: int) -> None:
        """Let `stage` have what earlier ones have computed, if that can be carried to it."""
        for placeholder in self._computed(args, kwargs):
            current = self._substitutes.replace(placeholder)
            if current.stage != stage and self._side_inputs.carried.knows(placeholder):
                self._side_inputs.check_kind(max(0, self._where()[0]), placeholder)
                self._substitutes.put(placeholder, placeholder_like(placeholder, watch=self.watch, stage=stage))

    def _computed(self, args: Any, kwargs: Any) -> list[Placeholder]:
        """The tensors among arguments that were computed with parameters."""
        return [leaf for leaf in tree_leaves((args, kwargs)) if is_placeholder(leaf) and leaf.stage is not None]

    def _refuse(self, placeholder: Placeholder) -> None:
        position, is_in_layer = self._where()
        where = "the step"
        if position >= 0:
            begun = self._paths[position]
            where = begun if is_in_layer else f"the step, after {begun},"
        raise ConfigurationError([foreign(f"{where} takes", [placeholder])])
