"""ZeRO-1: each rank steps its part of the parameters and keeps optimizer state for that part only.

Source: Rajbhandari et al. 2020. The user's optimizer object, groups and schedulers are kept: a rank hides the gradients
of the others' parameters while the optimizer steps. Every optimizer of torch skips parameters without a gradient, makes
no state for them and does not decay them. Each parameter belongs to one rank as a whole, so that optimizers with
statistics of a whole matrix (Adafactor, Muon, LAMB) compute the same as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import LBFGS, Optimizer
from torch.utils._pytree import tree_map_only

from lightning_parallel import _torch
from lightning_parallel.module.optimizer_hooks import register_update_hooks
from lightning_parallel.module.optimizer_state import StateOfRank


def optimizer_violations(optimizer: Optimizer) -> list[str]:
    """Reasons why `optimizer` cannot be sharded; empty if it can."""
    if isinstance(optimizer, LBFGS):
        return ["LBFGS keeps one history of all parameters together, which cannot be sharded; use ddp_custom"]
    if shards_itself(optimizer):
        return [
            "ZeroRedundancyOptimizer deals parameters out to the ranks as zero1_custom does, and not to the same ones; "
            "give the optimizer of its optimizer_class, or use ddp_custom"
        ]
    return wrapper_violations(optimizer)


def wrapper_violations(optimizer: Optimizer) -> list[str]:
    """The reason why the state of `optimizer` cannot be gathered, nor loaded in parts; empty if it can.

    Args:
        optimizer: The user's.
    """
    if _torch.optimizers.is_initialized(optimizer):
        return []
    return [
        f"{type(optimizer).__name__} is an optimizer that has not called Optimizer.__init__, as some do that wrap "
        "another one: nobody knows which state belongs to which parameter; use ddp_custom, or give the wrapped one"
    ]


def shards_itself(optimizer: Optimizer) -> bool:
    """Whether `optimizer` is torch's `ZeroRedundancyOptimizer`.

    Args:
        optimizer: The user's.
    """
    # By name: to import the class takes two seconds, and torch warns of what it does then.
    return any(
        base.__name__ == "ZeroRedundancyOptimizer" and base.__module__.startswith("torch.distributed.optim")
        for base in type(optimizer).__mro__
    )


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


@dataclass(frozen=True)
class _Outline:
    """Shape, strides and dtype of a tensor, which have to be known before it is received."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Outline:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)

    def laid_out(self, value: Tensor) -> Tensor:
        """The contiguous `value`, laid out in memory as the tensor is."""
        if value.stride() == self.stride:
            return value
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu").copy_(value)


def _is_plain(tensor: Tensor) -> bool:
    """Whether collectives take it: not a tensor of several, such as codes of 8 bits with their scales."""
    return not hasattr(type(tensor), "__tensor_flatten__")


def _outlined(tensor: Tensor) -> _Outline | Tensor:
    return _Outline.of(tensor) if _is_plain(tensor) else tensor.detach().cpu()


class ShardedOptimizer:
    """ZeRO-1 for a user's optimizer, by hooks on it; `detach` removes them.

    Args:
        optimizer: The user's, on plain parameters; these and their gradients are equal on all ranks.
        host_group: All ranks, for host memory, where whole state is gathered: a device has no room for it. By default
            the process group, which has to be for host memory then.
        look: Called with the parameters before each update, when all gradients are there.

    Example:
        >>> sharded = ShardedOptimizer(torch.optim.AdamW(ddp.parameters()))
        >>> sharded.optimizer.step()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        host_group: ProcessGroup | None = None,
        look: Callable[[Collection[Tensor]], None] = lambda parameters: None,
    ) -> None:
        self.optimizer, self._look = optimizer, look
        self._host_group = host_group
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

    def own_part(self, state: Mapping[Any, Any]) -> dict[Any, Any]:
        """The entries of this rank in the ``"state"`` of the optimizer's ``state_dict()``.

        Of parameters of other ranks, user code may have kept something here, such as weights between two steps.
        """
        foreign = set(self._foreign)
        numbers = {number for number, parameter in enumerate(self._parameters()) if parameter not in foreign}
        return {number: entries for number, entries in state.items() if number in numbers}

    def gather_state(self) -> dict[str, Any] | None:
        """The whole optimizer's ``state_dict()`` in host memory on rank 0, ``None`` elsewhere. A collective."""
        state = self.optimizer.state_dict()
        whole = self._whole_state(self.own_part(state["state"]), is_for_all=False)
        return {**state, "state": whole} if self._rank == 0 else None

    def detach(self) -> None:
        """Remove the hooks; the optimizer steps all parameters again. Its state is still that of this rank."""
        for handle in self._handles:
            handle.remove()

    def make_whole(self) -> None:
        """Give every rank the whole state, in host memory, and remove the hooks. A collective."""
        own = self.own_part(self.optimizer.state_dict()["state"])
        self.detach()
        self._guard.detach()
        parameters = self._parameters()
        # Not by `load_state_dict`, which would put the state of all ranks on the device of each.
        for number, entries in self._whole_state(own, is_for_all=True).items():
            self.optimizer.state.pop(parameters[number], None)  # in the order of the parameters, as one process has it
            self.optimizer.state[parameters[number]] = entries

    def _whole_state(self, own: dict[Any, Any], *, is_for_all: bool) -> dict[Any, Any]:
        """The state of all ranks, on all of them or on rank 0, in host memory. A collective, one tensor at a time."""
        outlines: list[Any] = [None] * len(self._owned)
        dist.all_gather_object(outlines, tree_map_only(Tensor, _outlined, own), group=self._host_group)
        whole: dict[Any, Any] = {}
        for rank, outline in enumerate(outlines):
            if rank == self._rank:
                whole |= tree_map_only(Tensor, partial(self._sent, is_for_all=is_for_all), own)
            elif is_for_all or self._rank == 0:
                whole |= tree_map_only(_Outline, partial(self._received, rank=rank, is_for_all=is_for_all), outline)
        return dict(sorted(whole.items()))

    def _sent(self, tensor: Tensor, *, is_for_all: bool) -> Tensor | None:
        value = tensor.detach().cpu()
        if not _is_plain(tensor):
            return value  # its outline is the tensor itself
        if is_for_all:
            dist.broadcast(value.contiguous(), group=self._host_group, group_src=self._rank)
        elif self._rank != 0:
            dist.send(value.contiguous(), group=self._host_group, group_dst=0)
            return None  # a copy, which nobody wants here
        return value

    def _received(self, outline: _Outline, *, rank: int, is_for_all: bool) -> Tensor:
        value = torch.empty(outline.shape, dtype=outline.dtype, device="cpu")
        if is_for_all:
            dist.broadcast(value, group=self._host_group, group_src=rank)
        else:
            dist.recv(value, group=self._host_group, group_src=rank)
        return outline.laid_out(value)

    def _parameters(self) -> list[Tensor]:
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def _hide(self) -> None:
        self._look(self._parameters())
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
