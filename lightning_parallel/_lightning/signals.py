"""Signals and the end of runs: private names of Lightning."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

SignalConnector = _SignalConnector
"""Takes the signals of a run, and gives their handlers back; since 1.3, waits for a public way to replace it."""

WrappingCheckpointIO = _WrappingCheckpointIO
"""A plugin that writes checkpoints through another one; since 1.7, waits for a public name."""


def set_connector(trainer: Trainer, connector: Any) -> None:
    """Let `connector` take the signals of the run that begins.

    `Trainer._signal_connector`, since 1.3; waits for a public setter.
    """
    trainer._signal_connector = connector


def set_end_of_step(
    trainer: Trainer,
    called: Callable[[], None] | None,
    meet: Callable[[], None] = lambda: None,
    meet_all: Callable[[], None] = lambda: None,
) -> None:
    """Let `trainer` call `called` behind each training step after which a run can be resumed without a loss.

    That is after the validation that belongs to a step, not within an accumulation window, and after the end of an
    epoch where the step was its last. Nothing is broadcast before each step then: there, Lightning asks since 2.6
    whether rank 0 has had a signal, and waits for the device. `_TrainingEpochLoop._broadcast_sigterm_tensor`, since
    2.6; `_is_training_done`, since 1.5; `_should_accumulate`, since 1.1. They wait for a hook behind the validation.

    Args:
        trainer: The trainer.
        called: Without arguments; ``None`` undoes it.
        meet: Called behind each batch, before the validation that belongs to it and after it.
        meet_all: Called at the end of each epoch, before its hooks and after them.
    """
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop
    for each, name in ((loop, "on_advance_end"), (loop, "_broadcast_sigterm_tensor"), (epochs, "on_advance_end")):
        vars(each).pop(name, None)
    if called is not None:

        def is_between() -> bool:
            return not (loop._is_training_done or loop._should_accumulate())

        vars(loop)["on_advance_end"] = _followed(_between(meet, loop.on_advance_end), called, is_between)
        vars(epochs)["on_advance_end"] = _followed(_between(meet_all, epochs.on_advance_end), called, lambda: True)
        vars(loop)["_broadcast_sigterm_tensor"] = lambda: None


def _between(meet: Callable[[], None], run: Callable[..., None]) -> Callable[..., None]:
    def between(*args: Any) -> None:
        meet()
        run(*args)
        meet()

    return between


def _followed(first: Callable[..., None], then: Callable[[], None], is_time: Callable[[], bool]) -> Callable[..., None]:
    def followed(*args: Any) -> None:
        first(*args)
        if is_time():
            then()

    return followed


def leave_children() -> None:
    """Let the other ranks of this machine end at their own time.

    Without this, the process that has started them is killed as soon as one of them ends with another status than 0.
    `_ChildProcessObserver._child_processes`, since 2.0; waits for a public way to end the observer.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []


def end_children() -> None:
    """End the other ranks that this process has started on this machine.

    `_ChildProcessObserver._child_processes`, as in `leave_children`.
    """
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            for child in thread._child_processes:
                child.kill()
