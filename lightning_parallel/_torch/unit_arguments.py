"""Arguments of sharded units, of which FSDP2 makes copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel._torch.modes import not_compiled

Behind = Callable[[Callable[[Any], Any], Any], Any]
"""Takes FSDP2's hook behind a forward, and the output, to which that is to be applied; returns the new one."""
Note = Callable[[Any, Any], Behind | None]
"""Takes the arguments that a unit is given, and the copies that its forward gets; returns what runs behind it."""


def note_arguments(unit: nn.Module, note: Note) -> None:
    """Let `note` see what FSDP2's hook before the forward of a unit makes of its arguments.

    The hook takes containers apart to note tensors in them, and to cast them. `FSDPState._pre_forward_hook_handle` and
    `_post_forward_hook_handle`, since 2.4, have the numbers of hooks in `nn.Module._forward_pre_hooks` and
    `_forward_hooks`, since 1.0.

    Args:
        unit: A unit.
        note: Called in each forward.
    """
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    first, last = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
    before, after = unit._forward_pre_hooks[first], unit._forward_hooks[last]
    waiting: list[Behind | None] = []

    @not_compiled
    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        used = before(module, args, kwargs)
        waiting[:] = [note((args, kwargs), used)]  # none is left of a forward that has failed
        return used

    @not_compiled
    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        behind = waiting.pop() if waiting else None
        if behind is None:
            return after(module, args, output)
        return behind(lambda values: after(module, args, values), output)

    unit._forward_pre_hooks[first], unit._forward_hooks[last] = pre_forward, post_forward
