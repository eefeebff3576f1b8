"""Phases of training steps, and the profiler that hears when they begin and end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.profilers import Profiler
from typing_extensions import override

from lightning_parallel import _lightning
from lightning_parallel.callbacks.step_clock import Clock, Phases

OTHER = "other"
JOINED = "forward_backward"
BUBBLE = "bubble"
_NAMES = ("data", "copy", "forward", "backward", "optimizer", "checkpoint", OTHER)
_PARTS = ("forward", "backward")


class StepPhases:
    """Training as a sequence of phases, which may be inside of each other: time belongs to the innermost one.

    Args:
        clock: The clock.
        joins: Whether forward and backward run in turns, so that they are one phase.
    """

    def __init__(self, clock: Clock, *, joins: bool) -> None:
        self._joins = joins
        self._open = [OTHER]
        self._is_paused = False
        self._phases = Phases(clock)
        self._phases.enter(OTHER)

    @property
    def names(self) -> tuple[str, ...]:
        """The phases that there are."""
        if not self._joins:
            return _NAMES
        names = [JOINED if name in _PARTS else name for name in _NAMES]
        names.insert(names.index(JOINED) + 1, BUBBLE)
        return tuple(dict.fromkeys(names))

    def begin(self, name: str) -> None:
        """Begin a phase inside of the one that goes on."""
        if not self._is_paused:
            self._open.append(JOINED if self._joins and name in _PARTS else name)
            self._go_on()

    def end(self, name: str) -> None:
        """End a phase, with what is inside of it and was left by an error."""
        name = JOINED if self._joins and name in _PARTS else name
        if not self._is_paused and name in self._open[1:]:
            while self._open.pop() != name:
                pass
            self._go_on()

    def end_all(self) -> None:
        """End all phases that go on."""
        self._open = [OTHER]
        self._go_on()

    def pause(self) -> None:
        """Let nothing count until `resume`, and no phase begin or end."""
        self._is_paused = True
        self._phases.enter("")

    def resume(self) -> None:
        """Go on with the phase that was paused."""
        self._is_paused = False
        self._go_on()

    def cut(self) -> Phases:
        """Begin a new stretch; return the one that has ended."""
        return self._phases.cut()

    def _go_on(self) -> None:
        if self._phases.name != self._open[-1]:
            self._phases.enter(self._open[-1])


class TimedActions(Profiler):
    """The profiler of a trainer, with phases that begin and end with its actions, until `give_back`.

    Args:
        trainer: The trainer, whose profiler is replaced.
        phases: The phases.
    """

    def __init__(self, trainer: Any, phases: StepPhases) -> None:
        self.own: Profiler = trainer.profiler
        self._phases = phases
        self._known: dict[str, str | None] = {}
        trainer.profiler = self

    def give_back(self, trainer: Any) -> None:
        """Let the trainer have its own profiler again, also where another callback has replaced this one."""
        holder, held = trainer, trainer.profiler
        while held is not self and isinstance(held, TimedActions):
            holder, held = held, held.own
        if held is self:
            setattr(holder, "profiler" if holder is trainer else "own", self.own)

    def __getattr__(self, name: str) -> Any:
        if name == "own":  # an object that is being copied
            raise AttributeError(name)
        return getattr(self.own, name)

    def __del__(self) -> None:
        # The user's profiler lives on, and closes its file by itself.
        pass

    @override
    def start(self, action_name: str) -> None:
        self.own.start(action_name)
        if (phase := self._phase_of(action_name)) is not None:
            self._phases.begin(phase)

    @override
    def stop(self, action_name: str) -> None:
        if (phase := self._phase_of(action_name)) is not None:
            self._phases.end(phase)
        self.own.stop(action_name)

    @override
    def profile(self, action_name: str) -> Any:
        phase, own = self._phase_of(action_name), self.own.profile(action_name)
        return own if phase is None else self._timed(phase, own)

    @contextlib.contextmanager
    def _timed(self, phase: str, own: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
        with own as action_name:
            self._phases.begin(phase)
            try:
                yield action_name
            finally:
                self._phases.end(phase)

    def _phase_of(self, action_name: str) -> str | None:
        try:
            return self._known[action_name]
        except KeyError:
            return self._known.setdefault(action_name, _lightning.actions.phase_of(action_name))

    @override
    def summary(self) -> str:
        return self.own.summary()

    @override
    def describe(self) -> None:
        self.own.describe()

    @override
    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        self.own.setup(stage, local_rank, log_dir)

    @override
    def teardown(self, stage: str | None) -> None:
        self.own.teardown(stage)
