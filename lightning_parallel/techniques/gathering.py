"""Gather parameters around what is called in place of a unit's `forward`: steps, methods, and parts of the unit.

FSDP2 gathers the parameters of a unit around its `forward`. User code also calls other methods of it, or a module
inside of it (``self.model.encoder(x)``), whose parameters are shards at that moment unless a caller has gathered them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.given_containers import giving_back
from lightning_parallel.module.layer_stacks import owner_of

_ROOT = ""
_TRAINING = "training_step"
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "transformers", "torchvision", "torchmetrics")


def gather_in_steps(module: nn.Module, units: Sequence[str], step_methods: Sequence[str]) -> None:
    """Gather parameters in methods other than `forward`, and keep them where ``to(device)`` would move nothing.

    Args:
        module: The sharded module.
        units: Paths of its units.
        step_methods: Names of the module's methods that Lightning calls in place of `forward`.
    """
    for path in units:
        unit = module.get_submodule(path)
        _torch.fsdp.leave_where_it_is(unit)
        for method in ("forward", *step_methods) if path == _ROOT else _own_methods(unit):
            # What a training step writes goes into the shards, or is refused (`step_writes.py`).
            refuse = None if method == _TRAINING else _refuse_writes
            _torch.unit_calls.gather_around(
                unit, method, unit, takes_batch=method in step_methods, refuse=refuse, note=giving_back
            )


def gather_around_parts(
    module: nn.Module,
    units: Sequence[str],
    *,
    except_in: Sequence[str] = (),
    unless: Callable[[], bool] = lambda: False,
) -> None:
    """Gather the parameters of a unit around the forward of a module inside of it that is called from outside of it.

    What is called from inside passes by, as the unit has gathered them. So do, in steps, the parts of the root; a hook
    may call them by themselves. A gather needs all ranks, in hooks, too.

    Args:
        module: The sharded module.
        units: Paths of its units.
        except_in: Paths of modules whose parts are left alone.
        unless: Says of a call that its caller sees to the parameters.
    """
    parts = [path for path, _ in module.named_modules() if path not in units and owner_of(path, except_in) is None]
    inside = {path: owner_of(path, units) for path in parts}
    for path, owner in inside.items():
        if owner is not None:
            part = module.get_submodule(path)
            for method in _forwards(part):
                _gather_unless(unless, part, method, module.get_submodule(owner))


def gather_outside_of_schedule(
    module: nn.Module, units: Sequence[str], layers: Sequence[str], is_in_schedule: Callable[[], bool]
) -> None:
    """Gather parameters in calls of the module, and of its parts, from outside of a pipeline's schedule.

    Args:
        module: The sharded module.
        units: Paths of its units.
        layers: Paths of the layers that are cut into stages, which gather their own.
        is_in_schedule: Whether a schedule runs, which gathers around each microbatch.
    """
    if _ROOT in units:
        _gather_unless(is_in_schedule, module, "forward", module)
    gather_around_parts(module, units, except_in=layers, unless=is_in_schedule)


def _gather_unless(unless: Callable[[], bool], holder: nn.Module, method: str, unit: nn.Module) -> None:
    own = getattr(holder, method)
    _torch.unit_calls.gather_around(holder, method, unit, refuse=_refuse_writes, note=giving_back)
    gathered = vars(holder)[method]

    @functools.wraps(own)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (own if unless() else gathered)(*args, **kwargs)

    vars(holder)[method] = chosen


def gather_while_running(holder: object, method: str, module: nn.Module) -> None:
    """Gather the parameters of the unit that `module` is, if it is one, while ``holder.method`` runs.

    Args:
        holder: The object whose method is replaced.
        method: The method's name.
        module: The sharded module.
    """
    if isinstance(module, FSDPModule):
        # Who runs the method looks for what it writes.
        _torch.unit_calls.gather_around(holder, method, module, takes_batch=True)


def gather_in_method(module: nn.Module, units: Sequence[str], method: str) -> None:
    """Gather the parameters of the unit around a method of a submodule while that method runs.

    Args:
        module: The sharded module.
        units: Paths of its units.
        method: Path of the submodule and name of the method, such as ``"path.to.module.method"``.
    """
    path, _, name = method.rpartition(".")
    owner = owner_of(f"{path}." if path else "x", units)
    if owner is not None:
        unit = module.get_submodule(owner)
        _torch.unit_calls.gather_around(module.get_submodule(path), name, unit, refuse=_refuse_writes)


def _forwards(part: nn.Module) -> Iterator[str]:
    """Names of methods of a part that compute with its parameters for sure: they need all ranks."""
    has_parameters = next(part.parameters(), None) is not None
    if has_parameters and not isinstance(part, torch.jit.ScriptModule | nn.ModuleList | nn.ModuleDict):
        yield _torch.modules.called_method(part)
        yield from (name for name in _own_methods(part) if name.startswith("forward_"))


def _own_methods(unit: nn.Module) -> list[str]:
    """Names of methods besides `forward` from the user's own classes: user code may call them from outside the unit."""
    classes = [cls for cls in type(unit).__mro__ if cls.__module__.partition(".")[0] not in (*_LIBRARIES, "builtins")]
    return sorted(
        {
            name
            for cls in classes
            for name, value in vars(cls).items()
            if callable(value)
            and not isinstance(value, type | staticmethod | classmethod)
            and not name.startswith("__")
            and name not in vars(nn.Module)
        }
    )


def _refuse_writes(method: str) -> NoReturn:
    raise ConfigurationError([_LOST.format(method)])


_LOST = (
    "{} writes into parameters while they are gathered, and the change would be lost. Write in a hook, such as "
    "on_train_batch_end, where parameters are their shards; give layers=[], with which the step keeps what is written; "
    "or use zero1_custom"
)
