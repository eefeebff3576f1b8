"""Activation checkpoints of the user's around layers of a pipeline: each layer is checkpointed by itself.

Backward would call what is checkpointed again, without the tensors that a stage has received meanwhile, and layers out
of order. So the user's function runs as it is, and each layer in it under a checkpoint with the user's options. What
the function computes between layers is kept for backward.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_parallel import _torch
from lightning_parallel._torch.autograd import Checkpointed


class LayerCheckpoints:
    """Checkpoints around layers, opened while a stage runs its part of a step."""

    def __init__(self) -> None:
        self._checkpointed: Checkpointed | None = None
        self._is_in_layer = False

    @contextlib.contextmanager
    def opened(self, ends_here: Callable[[], bool]) -> Iterator[None]:
        """Inside this context, checkpoints of the user's are opened.

        Args:
            ends_here: Whether no layer follows in the step, so that a checkpoint is left as it is.
        """

        def opened(checkpointed: Checkpointed) -> contextlib.AbstractContextManager[None] | None:
            return None if self._is_in_layer or ends_here() else self._around(checkpointed)

        try:
            with _torch.autograd.checkpoints_opened(opened):
                yield
        finally:
            self._checkpointed, self._is_in_layer = None, False

    def run(self, layer: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a layer, under the user's checkpoint if there is one around it. Its own ones are left as they are.

        Args:
            layer: The layer.
            args: Its arguments.
            kwargs: Those by name.
        """
        if self._checkpointed is not None and torch.is_grad_enabled():
            layer = functools.partial(self._checkpointed, layer)
        self._is_in_layer = True
        result = layer(*args, **kwargs)
        self._is_in_layer = False
        return result

    @contextlib.contextmanager
    def _around(self, checkpointed: Checkpointed) -> Iterator[None]:
        self._checkpointed = checkpointed
        try:
            yield
        finally:
            if self._checkpointed is checkpointed:  # a step that was left may end this late, in another one
                self._checkpointed = None
