"""Notes on errors that come of parameters being shards: they name the value of an option that helps."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType, TracebackType

from torch.optim import Optimizer

from lightning_parallel import _torch
from lightning_parallel.errors import line_of_error


def add_shard_notes(exception: BaseException) -> None:
    """Say in a note of `exception` what to do, if it came of parameters being shards.

    Args:
        exception: The error.
    """
    words, optimizer = str(exception), _optimizer(exception)
    if optimizer and any(each in words for each in (*_MIXED, *_NO_RULES)):
        exception.add_note(_OPTIMIZER.format(optimizer))
    elif any(each in words for each in _MIXED):
        exception.add_note(_ELSEWHERE.format(_place(exception)))
    elif any(each in words for each in _NO_RULES):
        exception.add_note(_NO_RULE)
    elif _FREED in words:
        exception.add_note(_FREED_EARLY)
    elif _NOT_USED in words:
        exception.add_note(_NO_GRAPH)


def _optimizer(exception: BaseException) -> str:
    """The class and the line of the optimizer that was updating, outside of its closure; "" if there is none."""
    found = ""
    for step in _steps(exception):
        if isinstance(step.tb_frame.f_locals.get("self"), Optimizer):
            found = f"{type(step.tb_frame.f_locals['self']).__name__} at {{}}"
        elif (name := _module_of(step.tb_frame)).startswith("lightning") and name != _torch.whole_operands.__name__:
            found = ""
    return found.format(line_of_error(exception) or "its step")


def _place(exception: BaseException) -> str:
    line = line_of_error(exception)
    return f"code at {line}" if line else "the step"  # of an error in backward, no line is known


def _steps(exception: BaseException) -> Iterator[TracebackType]:
    step = exception.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_ELSEWHERE = (
    "A sharded parameter met a plain tensor: {} computes with parameters outside of the layer that owns them, where "
    "this package does not see it, as in a compiled function. Give layers=[], so that all parameters are gathered "
    "around the step, or use zero1_custom, where parameters stay whole. To clip gradients, give the Trainer "
    "gradient_clip_val."
)
_OPTIMIZER = (
    "{0} computes with whole parameters, as optimizers do that take matrices apart (Shampoo, K-FAC), and these are "
    "shards. Use zero1_custom, where parameters stay whole, and each rank keeps the state of some of them; or "
    "ddp_custom, if it computes with several of them together (SAM)."
)
_NO_RULE = (
    "torch does not know how to compute this on parts of a tensor: a hook or a step does it with a parameter or a "
    "gradient that is sharded. Compute it from whole values (p.full_tensor() or full_state_dict(trainer), everywhere) "
    "or use zero1_custom, where parameters stay whole."
)
_FREED_EARLY = (
    "A gathered parameter was freed before the backward of what was computed with it: the step calls a method of a "
    "layer other than its forward, or reads its weights, after other calls have gathered them. Name that method in "
    "forward_methods, or use fsdp_custom or zero1_custom."
)
_NO_GRAPH = (
    "torch.autograd.grad is asked for the gradient of what is in no graph here: layers compute with gathered copies of "
    "their shards, and stages of a pipeline with microbatches. Call backward and read .grad, or use zero1_custom, "
    "where parameters stay whole."
)
_MIXED = ("mixed torch.Tensor and DTensor", "different mesh")
_FREED = "storage of size 0"
_NOT_USED = "appears to not have been used in the graph"
_NO_RULES = ("Sharding propagation failed", "sharding strategy")
"""Words of torch's errors."""
