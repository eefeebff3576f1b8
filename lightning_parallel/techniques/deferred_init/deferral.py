"""Deferred initialisation: record how a module makes its weights, and replay it tensor by tensor.

`configure_model` runs with every new tensor on the meta device, where it takes no memory, while the operations that
would have filled it are recorded. After sharding they run for real, in the same order and from the same state of the
random number generator, so that the numbers are those of an eager build. Each tensor is sharded and freed as soon as
its last operation is done, so a rank has its shards and little more than one whole tensor at a time.

A module that cannot be recorded (construction depends on random values, or keeps tensors outside of parameters, buffers
and attributes) is built eagerly instead, from the same random state. The idea is that of torchdistX's deferred
initialisation.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_parallel.module.object_state import CONTAINERS, ObjectState
from lightning_parallel.ranks.random_streams import RandomState
from lightning_parallel.techniques.deferred_init.record import HostInsteadOfMeta, InitRecord, NotRecordableError


class Deferral:
    """Recording of a LightningModule's `configure_model`, for as long as it is attached.

    Args:
        tell: Takes a sentence for the user.
    """

    def __init__(self, *, tell: Callable[[str], None]) -> None:
        self.record: InitRecord | None = None
        self._tell = tell
        self._module: nn.Module | None = None

    def attach(self, module: nn.Module, *, to_meta: bool) -> None:
        """Replace ``module.configure_model`` until `detach`.

        Args:
            module: The module.
            to_meta: Whether to record; otherwise, and where recording fails, the module is built eagerly, even if it
                asks for the meta device itself.
        """
        self.record = None
        original: Any = module.configure_model

        @functools.wraps(original)
        def configure_model() -> None:
            if to_meta:
                self._build_deferred(module, original)
            else:
                with HostInsteadOfMeta():
                    original()

        self._module = module
        module.__dict__["configure_model"] = configure_model

    def give_back(self) -> None:
        """Give the module its own method back: it is built. A function of ours on it could not be pickled."""
        if self._module is not None:
            self._module.__dict__.pop("configure_model", None)
        self._module = None

    def detach(self) -> None:
        """Give the module its own method back, and forget the record."""
        self.give_back()
        self.record = None

    def _build_deferred(self, module: nn.Module, build: Callable[[], None]) -> None:
        before, random_state = [_state_of(child) for child in module.modules()], RandomState.take(_HOST)
        record = InitRecord()
        try:
            with record:
                build()
            record.finish(module)
        except Exception as error:
            for state in before:
                state.restore()
            random_state.restore(_HOST)
            reason = f"{error}" if isinstance(error, NotRecordableError) else f"{type(error).__name__}: {error}"
            with HostInsteadOfMeta():
                build()  # an error of the user's own code is raised again here
            self._tell(f"configure_model is not deferred, so each rank builds the whole module first ({reason})")
        else:
            self.record = record
            if record.accelerators:
                self._tell(
                    f"configure_model makes tensors on {', '.join(sorted(record.accelerators))}; deferred, they have "
                    "the numbers of a build on the host, whose generator draws them, and only shards go to the device"
                )


def unrecorded_meta_tensors(module: nn.Module, record: InitRecord | None) -> list[str]:
    """Names of parameters and buffers on the meta device that the record cannot make.

    Args:
        module: The module after `configure_model`.
        record: The record of its construction, if there is one.
    """
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if tensor.is_meta and (record is None or not record.knows(tensor))]


_HOST = torch.device("cpu")  # on which a recorded build draws


def _state_of(module: nn.Module) -> ObjectState:
    """All that hangs on a submodule, hooks included, so that an attempt to build can be undone."""
    return ObjectState(module, containers=(*CONTAINERS, OrderedDict))
