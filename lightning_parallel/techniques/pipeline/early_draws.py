"""Random numbers that a step draws before the end of its stack: the whole batch would get others than microbatches."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_parallel.module.held_objects import HeldObjects
from lightning_parallel.module.placeholders import placeholders_in
from lightning_parallel.techniques.pipeline.layer_router import LayerRouter


class EarlyDraws(TorchDispatchMode):
    """Watch for draws outside of the layers and before the last one has returned, in a trace on placeholders.

    Dropout behind an embedding is left out: its numbers end in the hidden states. A mask that is drawn from the batch
    alone may also decide about the labels.

    Args:
        router: The router of the stack, which knows where in the step it is.
        module: The module, which may hold generators of its own.
    """

    def __init__(self, router: LayerRouter, module: nn.Module) -> None:
        super().__init__()
        self.found = False
        self._router = router
        self._before: Any = _others()
        self._held = HeldObjects(module.modules())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._router.position >= 0 and self._before is not None:  # the stack begins
            self.found = self.found or _others() != self._before or self._held.has_drawn
            self._before = None
        is_before_the_end = self._router.position < self._router.plan.num_layers - 1 and not self._router.is_in_layer
        if is_before_the_end and torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.found = self.found or not placeholders_in((args, kwargs))
        return func(*args, **kwargs)


def _others() -> tuple[Any, ...]:
    """The states of the generators of `random` and `numpy`."""
    _name, keys, *rest = np.random.get_state()
    return random.getstate(), bytes(np.asarray(keys)), *rest
