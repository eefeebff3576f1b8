"""Routing of a step through a stack of which only some layers are on this rank.

A stage runs the user's own step. Layers of earlier stages return a placeholder. The first layer of this stage gets the
received tensor as its first argument. When the first layer of the next stage is called, the step is left with that
layer's argument. So code between layers runs where the layer before it ran. Other arguments that depend on parameters
are sent along and replace the placeholders.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel import _torch
from lightning_parallel.module.left_values import LeftValues
from lightning_parallel.module.placeholders import placeholders_in_place
from lightning_parallel.ranks.random_streams import drawing_from, seed_of_part
from lightning_parallel.techniques.pipeline.boundary import StageBoundary
from lightning_parallel.techniques.pipeline.carried import CarriedResults
from lightning_parallel.techniques.pipeline.joined import JoinedOutputs
from lightning_parallel.techniques.pipeline.layer_checkpoints import LayerCheckpoints
from lightning_parallel.techniques.pipeline.routing_refusals import ended_early, out_of_order
from lightning_parallel.techniques.pipeline.run_leavings import RunLeavings, refusing_writes
from lightning_parallel.techniques.pipeline.shape_inference import InferredShapes, collecting_hooks
from lightning_parallel.techniques.pipeline.side_inputs import SideInputs, Traced
from lightning_parallel.techniques.pipeline.stage_plan import BEFORE_THE_STACK, StagePlan
from lightning_parallel.techniques.pipeline.step_trace import StepTrace
from lightning_parallel.techniques.pipeline.substitution import Substitutes, SubstitutionMode
from lightning_parallel.techniques.pipeline.timing import StepClock
from lightning_parallel.techniques.pipeline.turns import CallOfLayer, DisorderError, run_here


class StageExit(BaseException):
    """Exit from a step at the end of a stage; a `BaseException`, so that no ``except Exception`` catches it.

    Args:
        passed: Tensors for the next stage: hidden states, then side inputs.
    """

    def __init__(self, passed: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.passed = passed


@dataclass(frozen=True)
class StepPart:
    """The part of a step that is run.

    Args:
        stage: The stage whose layers run; with ``None``, no layer runs, and all return placeholders.
        received: The tensors that the stage before has sent.
        seed: The seed of random numbers that layers draw.
        clock: Times the layers, if given.
        leaves_stack: Whether the step is left behind the last layer, too, with what it returns.
        joined: What the layers have returned already; if given, none of them runs.
        leaves_at_stack: Whether the step is left at the first layer, with the hidden states that it is given.
    """

    stage: int | None
    received: tuple[Tensor, ...] | None = None
    seed: int | None = None
    clock: StepClock | None = None
    leaves_stack: bool = False
    joined: JoinedOutputs | None = None
    leaves_at_stack: bool = False

    def ending(self, last: int) -> dict[str, bool]:
        """Whether the run comes to the end of the step, and is that of the whole batch.

        Args:
            last: The last stage.
        """
        return {"is_end": self.stage == last and not self.leaves_stack, "is_joined": self.joined is not None}


class LayerRouter:
    """Router of a step through the stack; open while a stage runs its part.

    Args:
        plan: The layers of each stage.
        paths: The paths of the layers, in order.
        rank: This rank of the pipeline.
        left_values: Finds what layers leave elsewhere than in their results.
        known: What traces of an earlier cut have shown.
    """

    def __init__(
        self, plan: StagePlan, paths: Sequence[str], rank: int, left_values: LeftValues, known: Traced | None = None
    ) -> None:
        self.plan, self._paths = plan, paths
        self.position, self.is_open = BEFORE_THE_STACK, False
        self.side_inputs = SideInputs(plan, paths, lambda: self.position, known)
        self.outside: CallOfLayer = run_here
        self._part = StepPart(None)
        self._substitutes = Substitutes()
        self._boundary = StageBoundary("", paths, self.side_inputs, self._substitutes)
        self._mode: SubstitutionMode | None = None
        self._inferred = InferredShapes(left_values)
        self._left = RunLeavings(plan, paths, rank, left_values, self.side_inputs.carried)
        self._trace: StepTrace | None = None
        self._order: list[int] | None = None
        self._checkpoints = LayerCheckpoints()

    @contextlib.contextmanager
    def traced(self, step: str, module: nn.Module, touch: Callable[[str], None]) -> Iterator[None]:
        """Inside this context, a step runs on placeholders only, and its operations are watched.

        Args:
            step: The step's name.
            module: The module; all its parameters are placeholders inside the context.
            touch: Called with the name of a parameter for each operation that takes it.

        Raises:
            ConfigurationError: From the step, where a stage would need a tensor that another one computes.
        """
        self._trace = StepTrace(
            step,
            self.plan,
            self._paths,
            side_inputs=self.side_inputs,
            substitutes=self._substitutes,
            where=lambda: (self.position, self.is_in_layer),
            touch=touch,
        )
        self._inferred.forget()
        try:
            self.side_inputs.by_step[step] = {}
            with placeholders_in_place(module, self._trace.watch), self.open(step, StepPart(None)):
                yield
        finally:
            self._trace = None
            self._inferred.forget()

    @contextlib.contextmanager
    def in_any_order(self, module: nn.Module) -> Iterator[list[int]]:
        """Inside this context, a step runs on placeholders only, and its layers are listed in the order of calls.

        Args:
            module: The module; all its parameters are placeholders inside the context.
        """
        self._order = []
        try:
            with placeholders_in_place(module), self.open("", StepPart(None)):
                yield self._order
        finally:
            self._order = None
            self._inferred.forget()

    @contextlib.contextmanager
    def open(self, step: str, part: StepPart) -> Iterator[None]:
        """Inside this context, a step runs only a part of itself.

        Args:
            step: The step's name.
            part: The part.
        """
        self._part, self._boundary = part, StageBoundary(step, self._paths, self.side_inputs, self._substitutes)
        self.position, self.is_open = BEFORE_THE_STACK, True
        opened = self._checkpoints.opened(lambda: self.position == self.plan.num_layers - 1 or self.is_in_layer)
        passes_more = part.stage is None or self.side_inputs.has_any(step)
        replace = self._substitutes.replace if self._trace is None else self._trace.look_outside
        self._mode = SubstitutionMode(replace, _noting(self._trace, self.side_inputs.carried)) if passes_more else None
        self.side_inputs.carried.begin(step, is_traced=self._trace is not None)
        try:
            with self._mode or contextlib.nullcontext(), opened:
                yield
        finally:
            self._left.end(self._substitutes.replace, **part.ending(self.plan.last))
            self.is_open, self._part, self._mode = False, StepPart(None), None
            self._substitutes.clear()
            self.side_inputs.carried.end()

    @property
    def is_in_layer(self) -> bool:
        """Whether a layer runs on placeholders."""
        return self._inferred.is_running

    def place(self, places: Sequence[int]) -> int:
        """The number of the layer that is called now, of the `places` at which it stands: the next, if it is there."""
        if self._order is not None:
            return next((place for place in places if place not in self._order), places[0])
        return self.position + 1 if self.position + 1 in places else places[0]

    def has(self, name: str) -> bool:
        """Whether a parameter belongs to a layer of the stack."""
        return any(name.startswith(f"{path}.") for path in self._paths)

    def check_end(self) -> None:
        """Refuse a step that has returned without calling all layers."""
        if self.position != self.plan.num_layers - 1:
            raise DisorderError([ended_early(self._paths[: self.position + 1])])

    def returned(self, output: Any) -> Any:
        """Return what a step has returned, with what this stage has received in its place; a trace notes its use.

        Args:
            output: What the step has returned.
        """
        if self._trace is not None:
            self._trace.note(((output,), {}), None)
        return self._substitutes.replace(output)

    def call(
        self, index: int, layer: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a layer, return a placeholder in place of its result, or leave the step with a `StageExit`.

        Args:
            index: The layer's number in the stack.
            layer: The layer.
            run: Its `__call__`, with all hooks.
            forward: Its `forward` alone.
            args: Its arguments.
            kwargs: Those by name.
        """
        given = args, kwargs
        if not self.is_open:
            self.position = index
            return self.outside(index, layer, run, forward, args, kwargs)
        if self._order is not None:
            self._order.append(index)
            return self._hand_on(index, layer, forward, given, given)
        if index != self.position + 1:
            raise DisorderError([out_of_order(self._paths[index], self._paths[: self.position + 1])])
        part = self._part
        if part.stage is None:
            assert self._trace is not None
            args, kwargs = self._trace.look_at_layer(index, args, kwargs)
            self.position = index
            return self._hand_on(index, layer, forward, (args, kwargs), given)
        if part.joined is not None:
            return self._pass_by(index, layer, forward, args, kwargs, part.joined)
        own = range(0) if part.leaves_at_stack else self.plan.layers_of(part.stage)
        if index == own.start and part.received is not None:
            args, kwargs = self._boundary.take(index, part.received, args, kwargs)
        args, kwargs = self._substitutes.replace((args, kwargs))
        if index == own.stop:
            raise StageExit(self._boundary.sent(index, args, kwargs))
        self.position = index
        if index < own.start:
            return self._hand_on(index, layer, forward, (args, kwargs), given)
        self._boundary.check_values(index, (args, kwargs))
        timed = contextlib.nullcontext() if part.clock is None else part.clock.of_layer(index)
        stream = _layer_stream(part.seed, index, is_needed=layer.training and torch.is_grad_enabled())
        with timed, stream, _torch.modes.outside_of(self._mode):  # the arguments are replaced already
            result = self._left.run(index, layer, functools.partial(self._checkpoints.run, run), (args, kwargs), given)
        if part.leaves_stack and index == self.plan.num_layers - 1:
            tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            raise StageExit((*tensors, *(part.received or ())[1:], *self._boundary.kept()))
        return result

    def _pass_by(
        self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, joined: JoinedOutputs
    ) -> Any:
        """Hand on the result of a layer of the whole batch."""
        if index == self.plan.layers_of(self.plan.last).start:
            self._boundary.take_joined(index, joined, args, kwargs)
        used = self._substitutes.replace((args, kwargs))
        self.position = index
        result = self._hand_on(index, layer, forward, used, (args, kwargs))
        if index == self.plan.num_layers - 1:
            self._boundary.take_kept(joined)
        return result

    def _hand_on(self, index: int, layer: nn.Module, forward: Callable[..., Any], used: Any, given: Any) -> Any:
        """Infer the layer's result, as placeholders; that of the last one may be known from the microbatches."""
        path, is_tried = self._paths[index], self._part.stage is None
        with refusing_writes(path, is_tried=is_tried):
            result = self._inferred.result(index, layer, forward, used, given, path=path, is_on_placeholders=is_tried)
        self._left.note_inferred(index, self._inferred, is_tried=is_tried)
        if self._part.joined is not None and index == self.plan.num_layers - 1:
            result = self._part.joined.in_place_of(result, path)
        for hook in collecting_hooks(layer):
            hook(layer, used[0], result)
        return result


def apply_layer_router(
    layers: Sequence[tuple[str, nn.Module]],
    plan: StagePlan,
    *,
    rank: int,
    left_values: LeftValues,
    known: Traced | None = None,
) -> LayerRouter:
    """Let the calls of `layers` go through a `LayerRouter`, in place. Names in the state dict stay.

    Args:
        layers: All layers of the stack with their paths, in the order in which they run.
        plan: The layers of each stage.
        rank: This rank of the pipeline.
        left_values: Finds what layers leave elsewhere than in their results.
        known: What passes from stage to stage, if it is known from a trace.
    """
    router = LayerRouter(plan, [path for path, _ in layers], rank, left_values, known)
    places: dict[nn.Module, list[int]] = defaultdict(list)
    for index, (_, layer) in enumerate(layers):
        places[layer].append(index)
    # One class for all layers of a class: a compiler makes a graph for each.
    classes = {cls: _routing(cls, router, places) for cls in {type(layer) for layer in places}}
    for layer in places:
        layer.__class__ = classes[type(layer)]
    return router


def _noting(trace: StepTrace | None, carried: CarriedResults) -> Callable[[Any, Any], None]:
    """Return what notes an operation outside of layers, by its arguments and its result."""

    def note(values: Any, result: Any) -> None:
        if trace is not None:
            trace.note(values, result)
        carried.note(result)

    return note


def _routing(cls: type[Any], router: LayerRouter, places: Mapping[nn.Module, Sequence[int]]) -> type[nn.Module]:
    # Around `__call__`, not `forward`: hooks of layers on other stages must not run, and the hook that gathers
    # parameters has to see the received tensors, so that backward gathers them again.
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(cls.__call__, self)
        forward = vars(self).get("forward") or functools.partial(cls.forward, self)
        with router.side_inputs.carried.noting(is_on=False):
            index = router.place(places[self])
            result = router.call(index, self, run, forward, args, kwargs)
        router.side_inputs.carried.note(result, layer=index)
        return result

    # Users compile functions around layers: what is routed is no part of their graphs.
    return _torch.modules.subclass_calling(cls, _torch.modes.not_compiled(call))


def _layer_stream(seed: int | None, index: int, *, is_needed: bool) -> contextlib.AbstractContextManager[None]:
    """Draw a layer's random numbers from its own seed: they do not depend on its stage, nor on other layers."""
    # Seeds of microbatches are neighbouring parts of one seed, so those of layers keep far away from them.
    return (
        contextlib.nullcontext()
        if seed is None or not is_needed
        else drawing_from(seed_of_part(seed, (index + 1) << 20))
    )
