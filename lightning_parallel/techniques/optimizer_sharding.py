"""ZeRO-1: each rank steps its part of the parameters and keeps optimizer state for that part only.

Source: Rajbhandari et al. 2020. The user's optimizer object, groups and schedulers are kept: a rank hides the gradients
of the others' parameters while the optimizer steps. Every optimizer of torch skips parameters without a gradient, makes
no state for them and does not decay them. Each parameter belongs to one rank as a whole, so that optimizers with
statistics of a whole matrix (Adafactor, Muon, LAMB) compute the same as on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.module.optimizer_hooks import register_update_hooks
from lightning_parallel.module.optimizer_state import StateOfRank


def optimizer_violations(optimizer: Optimizer) -> list[str]:
    """Reasons why `optimizer` cannot be sharded; empty if it can."""
    if isinstance(optimizer, LBFGS):
        return ["LBFGS keeps one history of all parameters together, which cannot be sharded; use ddp_custom"]
    return []


def deal_out(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Assign parameters to ranks: the largest first, each to the rank with the fewest elements so far.

    Args:
        sizes: The number of elements of each parameter.
        num_ranks: The number of ranks.

    Returns:
        The owner of each parameter; depends on `sizes` only, so that all ranks agree without communication.
    """
    loads = [0] * num_ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class ShardedOptimizer:
    """ZeRO-1 for a user's optimizer, by hooks on it; `detach` removes them.

    Args:
        optimizer: The user's, on plain parameters; these and their gradients are equal on all ranks.

    Example:
        >>> sharded = ShardedOptimizer(torch.optim.AdamW(ddp.parameters()))
        >>> sharded.optimizer.step()
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._rank = dist.get_rank()
        parameters = self._parameters()
        owners = deal_out([p.numel() for p in parameters], dist.get_world_size())
        self._owned: list[list[Tensor]] = [[] for _ in range(dist.get_world_size())]
        for parameter, owner in zip(parameters, owners, strict=True):
            self._owned[owner].append(parameter)
        self._foreign = [p for rank, owned in enumerate(self._owned) if rank != self._rank for p in owned]
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self.drop_foreign_state()
        self._handles = register_update_hooks(optimizer, before=self._hide, after=self._share)
        self._guard = StateOfRank(optimizer, frozenset(self._foreign).__contains__, where="under ZeRO")

    def drop_foreign_state(self) -> None:
        """Drop the state of other ranks' parameters: some optimizers make it early, and checkpoints contain it."""
        for parameter in self._foreign:
            self.optimizer.state.pop(parameter, None)

    def gather_state(self) -> dict[str, Any] | None:
        """The whole optimizer's ``state_dict()`` in host memory on rank 0, ``None`` elsewhere. A collective."""
        state = self.optimizer.state_dict()
        # Of parameters of other ranks, user code may have kept something here, such as weights between two steps.
        foreign = set(self._foreign)
        numbers = {number for number, parameter in enumerate(self._parameters()) if parameter not in foreign}
        own = {number: entries for number, entries in state["state"].items() if number in numbers}
        local = tree_map_only(Tensor, Tensor.cpu, own)
        parts: list[Any] | None = [None] * len(self._owned) if self._rank == 0 else None
        dist.gather_object(local, parts, dst=0)
        if parts is None:
            return None
        merged = {number: entries for part in parts for number, entries in part.items()}
        return {**state, "state": dict(sorted(merged.items()))}

    def detach(self) -> None:
        """Remove the hooks; the optimizer steps all parameters again. Its state is still that of this rank."""
        for handle in self._handles:
            handle.remove()

    def make_whole(self) -> None:
        """Give every rank the whole state and remove the hooks. A collective."""
        box = [self.gather_state()]
        dist.broadcast_object_list(box, src=0)
        self.detach()
        self._guard.detach()
        assert box[0] is not None
        self.optimizer.load_state_dict(box[0])

    def _parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def _hide(self) -> None:
        self._hidden = [(p, p.grad) for p in self._foreign if p.grad is not None]
        for parameter, _ in self._hidden:
            parameter.grad = None

    @torch.no_grad()
    def _share(self) -> None:
        # Gradients come back after the step, for anyone who reads them, such as a logger.
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []
        for rank, owned in enumerate(self._owned):
            _torch.groups.broadcast_tensors([parameter.detach() for parameter in owned], source=rank)
