"""Optimizers that compute with several parameters together, where a rank updates some: refused in the first update.

A norm over all gradients, as in SAM, would be one over those of this rank, without an error of anyone.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Adafactor, Muon, Optimizer, SparseAdam

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError, line_of_user
from lightning_parallel.ranks.step_reads import update_noted
from lightning_parallel.techniques.local_update import is_elementwise

_BY_PARAMETER = frozenset({Adafactor, Muon, SparseAdam})
"""Optimizers of torch that compute each parameter by itself, beside those that compute each element so."""
_Noting = Callable[[Callable[[], Any]], contextlib.AbstractContextManager[Callable[[], Any]]]
_AROUND = ("lightning_parallel.", "lightning.")
"""Beginnings of names of modules that act around an update: what they call, such as clipping, is not part of it."""
UNDER_ZERO = (
    "{0}{1} computes with several parameters together, as a norm over all gradients does, but under zero1_custom a "
    "rank updates some of them, without the gradients of the others; use ddp_custom, or fsdp_custom"
)
UNDER_PIPELINE = (
    "{0}{1} computes with several parameters together, as a norm over all gradients does, but under a pipeline a rank "
    "has those of its own stages only; give pipeline=1"
)


class JointUpdates:
    """Looks at the first update of each optimizer of which it is not known that it takes parameters one by one.

    Example:
        >>> with updates.watched(optimizer, closure, UNDER_ZERO) as closure:
        ...     optimizer.step(closure)
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def __reduce__(self) -> tuple[type[JointUpdates], tuple[()]]:
        # A copy of a strategy, in another process or for another fit, has optimizers of its own.
        return type(self), ()

    @contextlib.contextmanager
    def watched(self, optimizer: Optimizer, closure: Callable[[], Any], refusal: str) -> Iterator[Callable[[], Any]]:
        """Inside this context, an update of `optimizer` is refused that takes several parameters together.

        Where a rank has parts of parameters, what torch cannot compute with parts is computed with whole values, as in
        steps and hooks.

        Args:
            optimizer: The user's.
            closure: What it calls for gradients, which may mix parameters as it likes.
            refusal: `UNDER_ZERO` or `UNDER_PIPELINE`; "" where each rank updates all parameters.

        Returns:
            `closure`, outside of the look.

        Raises:
            ConfigurationError: In the middle of the update, before such an operation.
        """
        is_known = is_elementwise(optimizer) or type(optimizer) in _BY_PARAMETER
        noted: _Noting = contextlib.nullcontext if is_known or not _has_parts(optimizer) else update_noted
        if is_known or not refusal or optimizer in self._known:
            with noted(closure) as closure:
                yield closure
            return
        name = type(optimizer).__name__

        def found() -> None:
            if _is_of_optimizer():
                line = line_of_user()
                raise ConfigurationError([refusal.format(name, f" at {line}" if line else "")])

        mode = _torch.joint_operations.JointOperations(optimizer, found)
        with contextlib.ExitStack() as looking:

            def look() -> None:
                # A compiler looks away from what runs under such a mode, and fails where it may not.
                looking.enter_context(torch.compiler.set_stance("force_eager"))
                looking.enter_context(mode)

            def outside() -> Any:
                looking.close()
                try:
                    return closure()
                finally:
                    look()

            look()
            with noted(outside) as outside_of_both:
                yield outside_of_both
        self._known.add(optimizer)


def _has_parts(optimizer: Optimizer) -> bool:
    return any(isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"])


def _is_of_optimizer() -> bool:
    """Whether an optimizer computes just now, and nothing around its update, such as clipping or a hook."""
    frame = inspect.currentframe()
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        if name.startswith(_AROUND) and name not in (__name__, _torch.joint_operations.__name__):
            return False
        frame = frame.f_back
    return False
