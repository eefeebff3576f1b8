"""Steps that leave parameters unused, on all ranks or on some, under sharding. Layer 2.

FSDP2 reduces the gradients of a unit in one collective. Where ranks use different parameters of a unit (a branch that
depends on the data, an expert without tokens), their collectives differ in size, and the step hangs or adds up the
wrong numbers. Torch can put zeros in the place of missing gradients; but then a parameter that no rank used has a
gradient of zeros, is decayed by AdamW and moved by momentum, which in one process it is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel import _torch


class UnusedParameters:
    """Puts zeros in the place of missing gradients, and takes them away where no rank had a gradient.

    A parameter is known to be unused here by a hook on its gathered form, without communication. Its gradient is taken
    away where this rank's shard of it is zero: then either no rank used it, or its gradient is zero in this shard.

    Args:
        units: The sharded units, in their final form.
    """

    def __init__(self, units: Sequence[nn.Module]) -> None:
        self._units = [unit for unit in units if _torch.reduce_unused_parameters(unit)]
        self._watched: set[Tensor] = set()
        self._used: set[Tensor] = set()

    def watch(self) -> None:
        """Watch the parameters that have been gathered by now; call it between forward and backward."""
        for unit in self._units:
            for sharded, gathered in _torch.gathered_parameters(unit):
                if sharded not in self._watched and gathered.requires_grad:
                    self._watched.add(sharded)
                    gathered.register_post_accumulate_grad_hook(self._note(sharded))

    @torch.no_grad()
    def settle(self) -> None:
        """Take zeros away that stand for no gradient; call it after backward."""
        for parameter in self._watched - self._used:
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and not gradient.to_local().any():
                parameter.grad = None
        self._used.clear()

    def _note(self, sharded: Tensor) -> object:
        def note(gathered: Tensor) -> None:
            self._used.add(sharded)

        return note
