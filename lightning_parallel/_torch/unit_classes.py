"""Classes of sharded units, under the names of the user's, and their backward: private names of torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fully_shard


def prepare_class(unit: nn.Module) -> None:
    """Make the class that `fully_shard` is going to give `unit`, and under which the user meets it.

    torch puts "FSDP" in front of the name, and bases the class on `FSDPModule` first: an object of a class whose own
    first base has no attributes (`Generic`, `ABC`, a mixin with empty `__slots__`) cannot be given that one, as Python
    takes the two for different layouts. The table `_fully_shard.cls_to_fsdp_cls`, since 2.4, is asked first; no public
    spelling. `_fully_shard._unimplemented_deepcopy`, since 2.4.
    """
    cls, known = type(unit), _fully_shard.cls_to_fsdp_cls
    if cls in known or isinstance(unit, FSDPModule):
        return
    own = type(cls.__name__, (FSDPModule, cls), _names_of(cls))
    try:
        unit.__class__ = own
    except TypeError:
        # Based on `cls` first, it has that layout; looking up a name is in torch's order nevertheless.
        own = _meta(cls)(cls.__name__, (cls, FSDPModule), _names_of(cls))
    unit.__class__ = cls
    known[cls] = own


def _names_of(cls: type) -> dict[str, Any]:
    # The compiler does not look into what says that it is torch's own: collectives of a split layer would be left out.
    module = __name__ if cls.__module__.startswith("torch.") else cls.__module__
    own = {"__module__": module, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return {**own, "__deepcopy__": _fully_shard._unimplemented_deepcopy}


def _meta(cls: type) -> type:
    """The metaclass of `cls`, with the order in which torch looks up names: `FSDPModule`, then `cls` and its bases."""

    def mro(new: type) -> list[type]:
        return [new, FSDPModule, *cls.__mro__]

    return type(type(cls).__name__, (type(cls),), {"mro": mro})


def refuse_second_order(unit: nn.Module, path: str) -> None:
    """Refuse ``create_graph=True`` in `unit`: it would read freed memory. `FSDPState._pre_backward`, since 2.4."""
    assert isinstance(unit, FSDPModule)
    state: Any = unit._get_fsdp_state()
    enter = state._pre_backward

    def entered(gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"create_graph=True in a backward through {path or 'the module'}, which frees its gathered weights; "
                "use ddp_custom or zero1_custom"
            )
        return enter(gradient)

    state._pre_backward = entered
