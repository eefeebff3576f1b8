"""Calls of sharded units: parameters are gathered around them, and FSDP2 makes copies of their arguments."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel._torch.modes import not_compiled
from lightning_parallel._torch.unit_parameters import GatheredWrites

Behind = Callable[[Callable[[Any], Any], Any], Any]
"""Takes FSDP2's hook behind a forward, and the output, to which that is to be applied; returns the new one."""
Note = Callable[[Any, Any], Behind | None]
"""Takes the arguments that a unit is given, and the copies that its forward gets; returns what runs behind it."""


def _nothing_noted(given: Any, used: Any) -> None:
    """No unit's arguments matter: a `Note`."""


def _applied(after: Callable[[Any], Any], output: Any) -> Any:
    """Run nothing more: a `Behind`."""
    return after(output)


def note_arguments(unit: nn.Module, note: Note) -> None:
    """Let `note` see what FSDP2's hook before the forward of a unit makes of its arguments.

    The hook takes containers apart to note tensors in them, and to cast them. `FSDPState._pre_forward_hook_handle` and
    `_post_forward_hook_handle`, since 2.4, have the numbers of hooks in `nn.Module._forward_pre_hooks` and
    `_forward_hooks`, since 1.0.

    Args:
        unit: A unit.
        note: Called in each forward.
    """
    layer = unit
    assert isinstance(unit, FSDPModule)
    state = unit._get_fsdp_state()
    first, last = state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id
    before, after = layer._forward_pre_hooks[first], layer._forward_hooks[last]
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

    layer._forward_pre_hooks[first], layer._forward_hooks[last] = pre_forward, post_forward


def gather_around(
    holder: Any,
    method: str,
    unit: nn.Module,
    *,
    takes_batch: bool = False,
    refuse: Callable[[str], NoReturn] | None = None,
    note: Note = _nothing_noted,
) -> None:
    """Gather the parameters of `unit` while ``holder.method`` runs.

    `register_fsdp_forward_method` (public) does this for methods that are never called from within `forward`. These
    may be, and a nested call must not free what its caller still needs. `FSDPState._pre_forward`, `_is_root`: 2.4.

    Args:
        holder: The object whose method is replaced.
        method: Its name.
        unit: The sharded unit.
        takes_batch: Whether it is given what Lightning has moved. torch would move what was left on the host, too.
        refuse: Ends a call that has written into gathered parameters, given the method; without, another keeps it.
        note: As of `note_arguments`.
    """
    module = unit
    assert isinstance(unit, FSDPModule)
    original, calls = getattr(holder, method), itertools.count(1)
    state = unit._get_fsdp_state()
    idle = type(state._training_state).IDLE

    @functools.wraps(original)
    def gathered(*args: Any, **kwargs: Any) -> Any:
        # Gathered by a caller already, who will free the parameters. The compiler looks into layers only, which are.
        if torch.compiler.is_compiling() or state._training_state != idle:
            return original(*args, **kwargs)
        behind: Behind = _applied
        if takes_batch or not (args or kwargs):
            state._pre_forward(unit, (None,), {})  # on GPUs, torch 2.11 cannot move what is empty
        else:
            given, (args, kwargs) = (args, kwargs), state._pre_forward(unit, args, kwargs)
            behind = note(given, (args, kwargs)) or _applied
        writes = None if refuse is None else GatheredWrites(unit)
        result = original(*args, **kwargs)
        changed = writes is not None and writes.have_happened(next(calls))
        result = behind(functools.partial(state._post_forward, unit, args), result)
        if state._is_root and not takes_batch:
            _reshard_all(module)  # it is no step, after which torch leaves some units as they are: hooks see shards
        if changed and refuse is not None:
            refuse(method)
        return result

    vars(holder)[method] = gathered  # past the `__setattr__` of compiled modules, which hand it on


def _reshard_all(module: nn.Module) -> None:
    for inner in module.modules():
        if isinstance(inner, FSDPModule):
            inner.reshard()
