"""Notes on errors that come of parameters being shards: they name the value of an option that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FrameType, TracebackType
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from lightning_parallel.errors import line_of_error
from lightning_parallel.module.layer_stacks import owner_of

_CALLING_HOOKS = "lightning.pytorch.trainer.call"
_CALLING_MODULES = ("torch.nn.modules.module", "lightning_parallel._torch")
"""Modules of Python whose functions only call a method of the user's."""


class _Method(NamedTuple):
    """A method of a submodule that was running, and the line that has called it."""

    path: str
    name: str
    line: str

    def __str__(self) -> str:
        return f"{self.path}.{self.name}".lstrip(".")


def add_shard_notes(exception: BaseException, module: nn.Module, units: Sequence[str]) -> None:
    """Say in a note of `exception` what to do, if it came of parameters of `module` being shards.

    Args:
        exception: The error.
        module: The sharded module.
        units: Paths of its units; the module itself is none under manual optimization.
    """
    words, optimizer = str(exception), _optimizer(exception)
    if optimizer and any(each in words for each in (*_MIXED, *_NO_RULES)):
        exception.add_note(_OPTIMIZER.format(optimizer))
    elif any(each in words for each in _MIXED):
        exception.add_note(f"A sharded parameter met a plain tensor: {_mixed(exception, module, units)}. {_CLIPPING}")
    elif any(each in words for each in _NO_RULES):
        exception.add_note(_NO_RULE)
    elif _FREED in words:
        exception.add_note(_FREED_EARLY)
    elif _NOT_USED in words:
        exception.add_note(_NO_GRAPH)


def _mixed(exception: BaseException, module: nn.Module, units: Sequence[str]) -> str:
    steps = list(_steps(exception))
    methods = list(_methods(steps, module))
    path = methods[-1].path if methods else ""
    unit = path if path in units else owner_of(path or "x", units)
    in_unit = [each for each in methods if each.path and f"{each.path}.".startswith(f"{unit}." if unit else "")]
    if _is_in_hook(steps):
        if path and unit is not None:
            return _HOOK.format(in_unit[0])  # the unit is gathered around the call with which the hook has come to it
        return _READ_IN_HOOK.format(methods[-1]) if methods else _ELSEWHERE.format(_place(exception))
    if unit and in_unit[0][:2] != (unit, "forward"):
        return _METHOD.format(in_unit[0], unit)
    return (_ELSEWHERE if "" in units else _ELSEWHERE_MANUAL).format(_place(exception))


def _optimizer(exception: BaseException) -> str:
    """The class and the line of the optimizer that was updating, outside of its closure; "" if there is none."""
    found = ""
    for step in _steps(exception):
        if isinstance(step.tb_frame.f_locals.get("self"), Optimizer):
            found = f"{type(step.tb_frame.f_locals['self']).__name__} at {{}}"
        elif _module_of(step.tb_frame).startswith("lightning"):
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


def _methods(steps: Sequence[TracebackType], module: nn.Module) -> Iterator[_Method]:
    """The methods of submodules that were running, outer before inner."""
    paths, line = {child: path for path, child in module.named_modules()}, ""
    for step in steps:
        frame = step.tb_frame
        if not _module_of(frame).startswith(_CALLING_MODULES):
            holder = frame.f_locals.get("self")
            if isinstance(holder, nn.Module) and holder in paths:
                yield _Method(paths[holder], frame.f_code.co_name, line)
            line = f"{frame.f_code.co_filename}:{step.tb_lineno}"


def _is_in_hook(steps: Sequence[TracebackType]) -> bool:
    """Whether a hook was running, and no step: Lightning calls steps through the strategy."""
    names = [_module_of(step.tb_frame) for step in steps]
    callers = [name for name in names if name.startswith("lightning") and not name.startswith(_CALLING_MODULES)]
    return bool(callers) and callers[-1] == _CALLING_HOOKS


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


_METHOD = (
    "{0} was called at {0.line}, from outside of {1}, whose parameters are gathered together. Give "
    "forward_methods=['{0}'], so that they are gathered while it runs, or use zero1_custom, where parameters stay whole"
)
_HOOK = (
    "{0} was called at {0.line}, in a hook, outside of a step, where parameters are shards. Give "
    "forward_methods=['{0}'], and call it on all ranks, or use zero1_custom, where parameters stay whole"
)
_READ_IN_HOOK = (
    "{0} was called at {0.line}, in a hook, outside of a step, where parameters are shards. Give "
    "forward_methods=['{0}'] and layers=[], so that all parameters are gathered while it runs, and call it on all "
    "ranks, or use zero1_custom, where parameters stay whole"
)
_ELSEWHERE = (
    "{0} reads the parameters of a layer outside of that layer's forward (a penalty over parameters() in the "
    "loss, a layer's weight used elsewhere). Give layers=[], so that all parameters are gathered around the step, or "
    "use zero1_custom, where parameters stay whole"
)
_ELSEWHERE_MANUAL = (
    "{0} reads the parameters of a submodule outside of that submodule's forward (a penalty over parameters() "
    "in the loss, a weight used elsewhere). Under manual optimization nothing gathers them around the step: use "
    "zero1_custom, where parameters stay whole"
)
_OPTIMIZER = (
    "{0} computes with whole parameters, as optimizers do that take matrices apart (Shampoo, K-FAC), and these are "
    "shards. Use zero1_custom, where parameters stay whole, and each rank keeps the state of some of them."
)
_CLIPPING = "To clip gradients, give the Trainer gradient_clip_val."
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
