"""Unused parameters under sharding: steps that leave some without a gradient, on all ranks or on some.

FSDP2 reduces the gradients of a unit in one collective. Where ranks use different parameters of a unit (a branch that
depends on the data, an expert without tokens), their collectives differ in size, and the step fails or adds up the
wrong numbers. Torch can put zeros in the place of missing gradients, but then a parameter that no rank used has a
gradient of zeros. AdamW decays it and momentum moves it, which would not happen in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from lightning_parallel import _torch
from lightning_parallel.module.unit_order import UnitOrder


class UnusedParameters:
    """Zeros in the place of missing gradients, removed again where no rank had a gradient.

    Hooks on a parameter's gathered form and on its shard tell the host whether it was used here. The ranks agree on it
    in host memory, with one byte for each parameter, so no rank waits for its device.

    Args:
        units: The sharded units, in their final form.
        group: The ranks that share the parameters, with a backend for host memory.
        order: The order in which this rank calls units, on which the ranks agree on the way.
    """

    def __init__(self, units: Sequence[nn.Module], group: ProcessGroup, order: UnitOrder) -> None:
        self._units = [unit for unit in units if isinstance(unit, FSDPModule)]
        for unit in self._units:
            _torch.fsdp.reduce_unused_parameters(unit)
        self._group = group
        self._order = order
        self._watched: list[Tensor] = []
        self._known: set[Tensor] = set()
        self._used: set[Tensor] = set()
        self._accumulated: set[Tensor] = set()

    def watch(self) -> None:
        """Put hooks on parameters that have been gathered by now; call it between forward and backward."""
        self._order.note()
        for unit in self._units:
            for sharded, gathered in _torch.unit_parameters.gathered_parameters(unit):
                if sharded not in self._known and gathered.requires_grad:
                    self._known.add(sharded)
                    self._watched.append(sharded)
                    gathered.register_post_accumulate_grad_hook(self._note(sharded))
                    # Code outside of layers, such as a penalty, gives the shard itself a gradient. A hook behind the
                    # accumulation FSDP2 would call, too, where it sets the gradient that it has reduced.
                    sharded.register_hook(self._note(sharded))

    def keep_present(self) -> None:
        """Keep gradients that exist before backward, such as the zeros of `zero_grad(set_to_none=False)`."""
        self._accumulated.update(parameter for parameter in self._watched if parameter.grad is not None)

    @torch.no_grad()
    def settle(self) -> None:
        """Remove zeros where no rank had a gradient; call it after each backward, on all ranks. A collective.

        Raises:
            RanksDifferError: If ranks have called other units than others.
        """
        if not self._watched and not self._order.units:
            return
        # Of all parameters, since ranks that do not call the same units have not gathered the same ones.
        sharded = [parameter for unit in self._units for parameter in _torch.unit_parameters.sharded_parameters(unit)]
        own = self._order.votes()
        flags = torch.tensor([*own, *(parameter in self._used for parameter in sharded)], dtype=torch.uint8)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        votes = flags.tolist()
        self._order.check(votes[: len(own)])
        for parameter, is_used in zip(sharded, votes[len(own) :], strict=True):
            if parameter not in self._known:
                continue
            if is_used:
                self._accumulated.add(parameter)
            elif parameter not in self._accumulated:
                parameter.grad = None
        self._used.clear()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Note that a step has used up the gradients of `parameters`."""
        self._accumulated.difference_update(parameters)

    def _note(self, sharded: Tensor) -> Callable[[Tensor], None]:
        def note(gathered: Tensor) -> None:
            self._used.add(sharded)

        return note
