"""The package's exceptions, and the line of the user's code. No torch, so that anything may import it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterable, Sequence
from types import FrameType

_FRAMEWORKS = ("lightning_parallel", "lightning", "lightning_fabric", "torch", "torchmetrics")
_AT_WORK = ("torch.optim", "torch.amp")
"""Modules in which optimizers and scalers do their own work, though a class of theirs may be the user's."""
_NOT_ASKING = (
    "lightning_parallel",
    *_AT_WORK,
    "lightning.fabric",
    "lightning.pytorch.core",
    "lightning.pytorch.loops",
    "lightning.pytorch.plugins",
    "lightning.pytorch.strategies",
)
"""Modules that look at gradients and shards for their own work; whatever a user calls in between, such as
`torch.nn.utils`, asks for the user."""
_CALLING_HOOKS = "lightning.pytorch.trainer.call"
_CALLING_BACKWARD = "lightning.pytorch.plugins.precision.precision", "backward"
"""The method `backward` of a module is called by a plugin; one of the user's may do more than that."""
_ENGINE = "torch.autograd.graph"
"""The module that runs backward."""
_PASSING_ON = ("lightning_parallel._torch.whole_operands", "torch.optim.swa_utils")
"""Through which functions of torch are called by those that call them: averages are updated in hooks."""
_OTHERS = ("lightning_utilities", "numpy", "contextlib", "copy", "pickle", "tensorboard", "tensorboardX", "safetensors")
_LIBRARIES = (*_FRAMEWORKS, *_OTHERS)


class ConfigurationError(ValueError):
    """A set-up that cannot run, with every reason at once.

    Each violation says what was given, what is required and what to change.

    Args:
        violations: One sentence or short paragraph for each reason, in the order in which to mend them.

    Example:
        >>> raise ConfigurationError(["shard=3 does not divide 4 ranks; possible: 1, 2, 4"])
    """

    def __init__(self, violations: Sequence[str]) -> None:
        self.violations = tuple(violations)
        super().__init__(self._text())

    def _text(self) -> str:
        if len(self.violations) == 1:
            return self.violations[0]
        numbered = (f"  {index}. {violation}" for index, violation in enumerate(self.violations, start=1))
        return "\n".join([f"this set-up has {len(self.violations)} problems:", *numbered])

    def __reduce__(self) -> tuple[type[ConfigurationError], tuple[tuple[str, ...]]]:
        # Pickle would call the class with `args`, which hold the text and not the violations.
        return type(self), (self.violations,)


class FirstStepError(RuntimeError):
    """The first step of a fit differs from that of one process; nothing has been updated.

    Example:
        >>> Trainer(strategy=MeshStrategy(tensor=2, check="off"))  # to train nevertheless
    """


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or a file that is none; says which, why, and what to change.

    Example:
        >>> Trainer(strategy=MeshStrategy(on_save_error="warn"))  # to train on where one cannot be written
    """


class RanksDifferError(RuntimeError):
    """Ranks that must hold equal values do not: training has gone wrong since the last time that they did.

    Example:
        >>> Trainer(callbacks=[Verify(every=100)])  # raises it at most 100 steps later
    """


class NonFiniteError(RuntimeError):
    """The loss or gradients were not finite in too many updates in a row; all of these have been skipped.

    Example:
        >>> Trainer(callbacks=[NonFinite(10)])  # raises it after 10 in a row
    """


def check(violations: Iterable[str]) -> None:
    """Raise a :class:`ConfigurationError` with all `violations`, or return if there are none."""
    found = [violation for violation in violations if violation]
    if found:
        raise ConfigurationError(found)


def line_of_user(frame: FrameType | None = None) -> str:
    """Where the user's code stands, such as ``train.py:30``: the innermost call from outside of frameworks.

    Args:
        frame: The innermost call to look at, maybe of another thread; by default this one.

    Returns:
        File and line; "" if no such code is on the stack.
    """
    frame = frame or inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES:
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def line_of_error(error: BaseException) -> str:
    """Where the user's code stood when `error` was raised, such as ``train.py:30``; "" if there is none."""
    found, step = "", error.__traceback__
    while step is not None:
        if str(step.tb_frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES:
            found = f"{step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return found


def is_asked_by_user(*within: str) -> bool:
    """Whether user code asks for something just now, itself or through a library: no framework, no optimizer at work.

    Args:
        within: Beginnings of names of modules whose calls belong to what is asked for; those of the caller do.
    """
    frame = inspect.currentframe()
    frame = frame and frame.f_back
    own = (__name__, str(frame.f_globals.get("__name__", "")) if frame else "", *within)
    is_within, has_user = True, False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        is_within = is_within and name.startswith(own)
        if not is_within:
            if name.startswith(_AT_WORK):
                return False
            if name.partition(".")[0] in ("lightning_parallel", "lightning", "lightning_fabric"):
                return has_user
            has_user = has_user or name.partition(".")[0] not in _LIBRARIES
        frame = frame.f_back
    return has_user


def asking(*within: str) -> str:
    """Where user code asks for something just now: in a ``"hook"``, in a ``"script"`` outside of any run, else ``""``.

    A step is none of these, nor is a backward, an optimizer or a scaler at work, or the package.

    Args:
        within: Names of modules whose calls belong to what is asked for.
    """
    frame, own = inspect.currentframe(), (__name__, *within)
    is_within, has_user, in_backward = True, False, False
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name in _PASSING_ON:
            frame = frame.f_back
            continue
        is_within = is_within and name in own
        in_backward = in_backward or name == _ENGINE
        of_user = has_user and not in_backward
        if name == _CALLING_HOOKS or (of_user and (name, frame.f_code.co_name) == _CALLING_BACKWARD):
            return "hook"
        if not is_within and name.startswith(_NOT_ASKING):
            return ""
        has_user = has_user or name.partition(".")[0] not in _LIBRARIES
        frame = frame.f_back
    # On a device, backward runs in a thread of its own, in which no frame says for whom.
    return "script" if has_user and threading.current_thread() is threading.main_thread() else ""
