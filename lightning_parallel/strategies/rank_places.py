"""The place of this rank in its run, read by another thread: the batch, the hook, the user's line, the collective."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from sys import _current_frames as frames_of_threads
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import nn

from lightning_parallel import _lightning, _torch
from lightning_parallel.errors import line_of_user

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

READS = "reads data"
SAVES = "saves a checkpoint"
PREPARES = "prepares data"
_DOINGS = {
    "_engine_run_backward": ("torch.autograd.", "runs backward"),
    "save_checkpoint": ("lightning", SAVES),
    "load_checkpoint": ("lightning", "loads a checkpoint"),
    "prepare_data": ("lightning.", PREPARES),
    "__next__": ("lightning.pytorch.loops.fetchers", READS),
}
"""Function -> the module that it is of, and what it does."""
_WAITS = {
    "_wait": ("lightning_parallel.strategies.failures", "rank 0 or a checkpoint of all ranks"),
    "_store_based_barrier": ("torch.distributed.distributed_c10d", "a new process group"),
    "_new_process_group_helper": ("torch.distributed.distributed_c10d", "a new process group"),
}
"""Function that waits for other ranks without a collective -> the module that it is of, and what it waits for."""
_STAGES = {
    RunningStage.TRAINING: "training, epoch {}",
    RunningStage.SANITY_CHECKING: "the sanity check",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}
_DEBUGGERS = ("bdb", "pdb", "ipdb", "pudb", "pydevd", "debugpy", "_pydevd_bundle", "IPython")


class Place(NamedTuple):
    """The place of a rank.

    Args:
        batch: Such as ``"training, epoch 0, batch 3"``.
        progress: Numbers that change from batch to batch.
        has_begun: Whether a batch has been completed, so that nothing is done for the first time.
        hook: The hook that runs; ``""`` if none does.
        doing: What it does there, if that has a name.
        layer: Path of the innermost layer that runs.
        line: File and line of the user's code.
        collective: What it waits in or for, equal on all ranks that wait for each other; ``""`` if it does not wait.
        is_debugged: Whether a debugger has stopped it.
    """

    batch: str
    progress: list[int]
    has_begun: bool
    hook: str = ""
    doing: str = ""
    layer: str = ""
    line: str = ""
    collective: str = ""
    is_debugged: bool = False

    @property
    def words(self) -> str:
        """The place in words, without the collective."""
        hook = f" in {self.hook}" if self.hook else ""
        layer = f" in {self.layer}" if self.layer else ""
        line = f", at {self.line}" if self.line else ""
        doing = f", {self.doing}" if self.doing and self.hook != "backward" else ""
        return f"{self.batch}:{hook or ' outside of hooks'}{layer}{doing}{line}"


def place_of(module: LightningModule, thread: int, begun: set[tuple[str, int]]) -> Place:
    """The place of the rank that trains `module`.

    Args:
        module: The user's module.
        thread: Identity of the thread in which the run is.
        begun: Groups and numbers of collectives that were there before the run.
    """
    trainer = _lightning.attached_trainer(module)
    place = Place("set-up", [], False) if trainer is None else _batch_of(trainer)
    waiting = [each for each in _torch.flight_recorder.pending() if (each.group, each.number) not in begun]
    collective = collective_in_words(waiting[0]) if waiting else ""
    for frame in _frames(thread):
        name, owner = frame.f_code.co_name, str(frame.f_globals.get("__name__", ""))
        if _top(frame) in _DEBUGGERS:
            place = place._replace(is_debugged=True)
        if name in _WAITS and owner.startswith(_WAITS[name][0]) and not collective:
            collective = _WAITS[name][1]
        if name in _DOINGS and owner.startswith(_DOINGS[name][0]) and not place.doing:
            place = place._replace(doing=_DOINGS[name][1])
        if not place.hook and owner == "lightning.pytorch.trainer.call":
            place = place._replace(hook=str(frame.f_locals.get("hook_name", "")))
        if not place.layer and name == "_call_impl" and owner == "torch.nn.modules.module":
            place = place._replace(layer=_path_of(frame.f_locals.get("self"), module))
    called = next((frame for frame in _frames(thread) if _top(frame) not in sys.stdlib_module_names), None)
    return place._replace(collective=collective, line="" if called is None else line_of_user(called))


def collective_in_words(pending: _torch.flight_recorder.Pending) -> str:
    """A collective in words, which are equal on all ranks that wait in it.

    Args:
        pending: The collective.
    """
    sizes = f" of {' and '.join(map(str, pending.shapes))}" if any(pending.shapes) else ""
    is_of_all = dist.group.WORLD is not None and pending.group == dist.group.WORLD.group_name
    return f"{pending.name}{sizes}, number {pending.number} of {'all ranks' if is_of_all else f'group {pending.group}'}"


def _frames(thread: int) -> Iterator[FrameType]:
    """The calls of a thread, the innermost first."""
    frame = frames_of_threads().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _top(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _path_of(layer: object, module: nn.Module) -> str:
    return next((path for path, each in module.named_modules() if each is layer), "")


def progress_of(trainer: Trainer) -> list[int]:
    """Numbers that change with each batch and each update of a run."""
    loops = [trainer.fit_loop.epoch_loop]
    if trainer.state.fn is not None:
        loops.append(_lightning.fetchers.evaluation_loop(trainer))
    batches = [loop.batch_progress.total for loop in loops]
    return [trainer.global_step, *(number for each in batches for number in (each.ready, each.completed))]


def _batch_of(trainer: Trainer) -> Place:
    progress, stage = progress_of(trainer), trainer.state.stage
    if stage is None:
        return Place("set-up", progress, False)
    loop = trainer.fit_loop.epoch_loop if trainer.training else _lightning.fetchers.evaluation_loop(trainer)
    batch = max(0, loop.batch_progress.current.ready - 1)
    name = _STAGES[stage].format(trainer.current_epoch)
    is_fitting = trainer.state.fn == TrainerFn.FITTING
    return Place(f"{name}, batch {batch}", progress, progress[2 if is_fitting else -1] > 0)
