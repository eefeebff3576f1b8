"""How a step runs through the stack where only some of its layers are here. Layer 2.

A stage runs the user's own step. Layers of earlier stages hand on a ghost; the first layer of this stage takes what was
received in the place of its first argument; when the first layer of the next stage is called, the step is left with
that argument. So whatever code there is between layers runs where the layer before it ran.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_parallel import _torch
from lightning_parallel.caches import is_cache
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ghosts import Ghost, Watch, ghost_like, ghosts_in, is_ghost, name_sources
from lightning_parallel.hidden_states import hidden_in, with_hidden
from lightning_parallel.randomness import seed_generators, seed_of_part
from lightning_parallel.stages import BEFORE_THE_STACK, StagePlan
from lightning_parallel.techniques.pipeline.rehearsal import unchanged
from lightning_parallel.techniques.pipeline.timing import StepClock

_REMEMBERED = 4096
"""How many results of layers of other stages are remembered: shapes only, about a kilobyte each."""


class StageExit(BaseException):
    """Leaves a step at the end of a stage, past any ``except Exception`` of the user's.

    Args:
        hidden: What the next stage goes on with.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Passage:
    """The way of a step through the stack; open while a stage runs its part.

    Args:
        plan: Which layers are which stage.
        paths: The paths of the layers, in order.
    """

    def __init__(self, plan: StagePlan, paths: Sequence[str]) -> None:
        self.plan = plan
        self.position = BEFORE_THE_STACK
        self._paths = paths
        self._stage: int | None = None
        self._is_open = False
        self._received: Tensor | None = None
        self._seed: int | None = None
        self._clock: StepClock | None = None
        self._handed_on: dict[Any, Any] = {}
        self._watch: Watch | None = None
        self.is_in_layer = False

    @contextlib.contextmanager
    def traced(self, module: nn.Module, touch: Callable[[str], None]) -> Iterator[None]:
        """In here, a step runs on ghosts only, and what it does is watched.

        Args:
            module: The module, whose parameters are all ghosts in here.
            touch: Takes the name of a parameter with each operation that takes it.

        Raises:
            ConfigurationError: From the step, where it takes to a stage what another one computes.
        """
        self._watch = Watch(lambda: self.plan.stage_at(self.position), touch, self._refuse)
        self._handed_on.clear()
        try:
            with ghosts_in_place(module, self._watch), self.open(None):
                yield
        finally:
            self._watch = None
            self._handed_on.clear()

    @contextlib.contextmanager
    def open(
        self,
        stage: int | None,
        received: Tensor | None = None,
        seed: int | None = None,
        clock: StepClock | None = None,
    ) -> Iterator[None]:
        """In here, a step is that of `stage`; with ``None``, no layer is run and all hand on ghosts.

        Args:
            stage: The stage's number.
            received: What the stage before left its step with.
            seed: Of the random numbers that layers draw.
            clock: What times layers.
        """
        self._stage, self._received, self._seed, self._clock = stage, received, seed, clock
        self.position, self._is_open, self.is_in_layer = BEFORE_THE_STACK, True, False
        try:
            yield
        finally:
            self._is_open, self._received, self._clock = False, None, None

    def has(self, name: str) -> bool:
        """Whether a parameter is one of a layer."""
        return any(name.startswith(f"{path}.") for path in self._paths)

    def check_end(self) -> None:
        """Call it where a step has returned.

        Raises:
            ConfigurationError: If it has not gone through all layers.
        """
        if self.position != self.plan.num_layers - 1:
            where = "no layer" if self.position < 0 else f"only the layers up to {self._paths[self.position]}"
            raise ConfigurationError([_disorder(f"the step called {where} of the stack")])

    def call(
        self, index: int, layer: nn.Module, run: Callable[..., Any], forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run layer `index`, hand on a ghost in its place, or leave the step."""
        if not self._is_open:
            return run(*args, **kwargs)
        if index != self.position + 1:
            raise ConfigurationError([_disorder(self._order(index))])
        if self._stage is None:
            stage = self.plan.stage_at(index)
            if index == self.plan.layers_of(stage).start:
                # From here on it counts as what this stage has received.
                hidden = self._check_hidden(index, hidden_in(args, kwargs))
                args, kwargs = with_hidden(ghost_like(hidden, watch=self._watch, stage=stage), args, kwargs)
            self.position = index
            return self._hand_on(index, layer, forward, args, kwargs)
        own = self.plan.layers_of(self._stage)
        if index == own.stop:
            raise StageExit(self._check_hidden(index, hidden_in(args, kwargs)))
        self.position = index
        if index < own.start:
            return self._hand_on(index, layer, forward, args, kwargs)
        if index == own.start and self._received is not None:
            args, kwargs = with_hidden(self._received, args, kwargs)
        if ghosts := ghosts_in((args, kwargs)):
            raise ConfigurationError([self._foreign(index, ghosts)])
        timed = contextlib.nullcontext() if self._clock is None else self._clock.of_layer(index)
        with timed, _own_stream(self._seed, index, is_needed=layer.training and torch.is_grad_enabled()):
            return run(*args, **kwargs)

    def _hand_on(self, index: int, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What the layer would return, as ghosts."""
        args, kwargs = tree_map(lambda value: None if is_cache(value) else value, (args, kwargs))
        key = (index, torch.is_grad_enabled(), *map(_kind, tree_leaves((args, kwargs))))
        if key not in self._handed_on:
            if len(self._handed_on) > _REMEMBERED:  # of batches whose length varies
                self._handed_on.clear()
            hidden = hidden_in(args, kwargs)
            args, kwargs = with_hidden(hidden if is_ghost(hidden) else ghost_like(hidden), args, kwargs)
            self.is_in_layer = True
            self._handed_on[key] = self._rehearsed(layer, forward, args, kwargs)
            self.is_in_layer = False
        return tree_map(lambda value: value.detach() if is_ghost(value) else value, self._handed_on[key])

    def _rehearsed(self, layer: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._watch is not None:  # all of the module is ghosts already, and what changes is undone
            return tree_map(_as_value, forward(*args, **kwargs))
        with torch.no_grad(), unchanged(layer), ghosts_in_place(layer):
            return tree_map(_as_value, forward(*args, **kwargs))

    def _check_hidden(self, index: int, hidden: Any) -> Tensor:
        if is_ghost(hidden) and self._watch is None:
            raise ConfigurationError([self._foreign(index, [hidden])])
        if not isinstance(hidden, Tensor) or hidden.is_nested or not hidden.is_floating_point():
            kind = "a nested tensor" if getattr(hidden, "is_nested", False) else type(hidden).__name__
            raise ConfigurationError(
                [
                    f"{self._paths[index]} is given {kind} as its first argument, where a pipeline stage needs the "
                    "hidden states as one plain tensor of floating-point numbers; give pipeline=1"
                ]
            )
        return hidden

    def _foreign(self, index: int, ghosts: list[Ghost]) -> str:
        return (
            f"{self._paths[index]} is given something that another pipeline stage computes (with "
            f"{name_sources(ghosts) or 'other layers'}): only the first argument of a layer passes from stage to "
            "stage. Compute what all layers need from the batch alone, without parameters, or give pipeline=1"
        )

    def _refuse(self, ghost: Ghost) -> None:
        begun = self._paths[self.position] if self.position >= 0 else ""
        where = f"{'' if self.is_in_layer else 'the step, after '}{begun}" if begun else "the step"
        raise ConfigurationError(
            [
                f"{where}, takes something that only another pipeline stage computes (with "
                f"{name_sources([ghost]) or 'other layers'}): nothing but the first argument of a layer passes from "
                "stage to stage. Compute what several stages need from the batch alone, without parameters, or give "
                "pipeline=1"
            ]
        )

    def _order(self, index: int) -> str:
        before = self._paths[self.position] if self.position >= 0 else "the beginning of the step"
        return f"the step called {self._paths[index]} after {before}"


def apply_passage(layers: Sequence[tuple[str, nn.Module]], plan: StagePlan) -> Passage:
    """Let the calls of `layers` go through a `Passage`, in place. Names in the state dict stay.

    Args:
        layers: All layers of the stack with their paths, in the order in which they run.
        plan: Which of them are which stage.
    """
    passage = Passage(plan, [path for path, _ in layers])
    for index, (_, layer) in enumerate(layers):
        layer.__class__ = _passing(type(layer), passage, index)
    return passage


def _passing(cls: type[Any], passage: Passage, index: int) -> type[nn.Module]:
    # Around __call__, not forward: no hook of a layer that is elsewhere runs, and gathering sees what was received.
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run, forward = functools.partial(cls.__call__, self), functools.partial(cls.forward, self)
        return passage.call(index, self, run, forward, args, kwargs)

    return _torch.subclass_calling(cls, call)


@contextlib.contextmanager
def ghosts_in_place(module: nn.Module, watch: Watch | None = None) -> Iterator[None]:
    """In here, all parameters of `module` are ghosts.

    Args:
        module: Any module.
        watch: What watches operations on them.
    """
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    stand_ins: dict[nn.Parameter, Ghost] = {}
    for path, submodule in module.named_modules():
        for name, parameter in submodule._parameters.items():
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                before.append((submodule, name, parameter))
                if parameter not in stand_ins:
                    stand_ins[parameter] = ghost_like(parameter, full, watch)
    try:
        for submodule, name, parameter in before:
            setattr(submodule, name, _torch.as_parameter(stand_ins[parameter]))
        yield
    finally:
        for submodule, name, parameter in before:
            setattr(submodule, name, parameter)


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if leaf is None or isinstance(leaf, bool | int | float | str) else type(leaf)


def _as_value(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


@contextlib.contextmanager
def _own_stream(seed: int | None, index: int, *, is_needed: bool) -> Iterator[None]:
    """Random numbers of one layer, whichever stage it is on: what other layers draw does not matter."""
    # `seed` is that of a microbatch, and theirs are neighbouring parts of one, so layers' are far from these.
    if seed is None or not is_needed:
        yield
        return
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        seed_generators(seed_of_part(seed, (index + 1) << 20))
        yield


def _disorder(what: str) -> str:
    return (
        f"{what}; a pipeline needs every step to call each layer of the stack once, one after the other from the first "
        "to the last. Name another stack with layers=, or give pipeline=1"
    )
