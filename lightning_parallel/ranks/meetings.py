"""Ranks that agree, before each collective in a layer, that all of them have come to it.

A layer is tried before it is trained. Where it raises on one rank, or does something else, others would wait for that
rank in a collective for ever; so they ask first, while it is tried.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_parallel import _torch

_DONE, _FAILED = 0, 1 << 40
"""The codes of ranks that come to no further collective; those of collectives are between them."""


class RanksPartedError(Exception):
    """Raised in place of a collective to which not all ranks have come."""


class Meetings(TorchDispatchMode):
    """Mode in which a rank begins a collective of `group` only if all ranks of it do.

    Args:
        group: The ranks that run the same code, and send each other tensors of the same shapes.
        device: Where its collectives work.

    Example:
        >>> with meetings:
        ...     output = layer(part)
        >>> meetings.close(has_failed=False)
        >>> meetings.has_parted
    """

    # Operations that take functions, such as flex attention, pass through as others do.
    supports_higher_order_operators = True

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__()
        self._group, self._device = group, device
        self.has_parted = False
        """Whether ranks have come to different places; then they have not gone on."""
        self.has_failed_elsewhere = False
        """Whether this is because another one has failed."""
        self.place = "the end of the layer"
        """The collective to which this rank has come, in words."""

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what they send is seen when they send it
        if _torch.groups.is_collective_of(self._group, func, args):
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            sizes = ", ".join(f"{list(leaf.shape)} of {leaf.dtype}" for leaf in given)
            self.place = f"{func.overloadpacket.__name__} with {sizes or 'no tensor'}"
            self._meet(1 + zlib.crc32(self.place.encode()))
            if self.has_parted:
                raise RanksPartedError(f"not all ranks come to {self.place}")
        return func(*args, **(kwargs or {}))

    def close(self, *, has_failed: bool) -> None:
        """Tell the others that this rank has come to the end, or has failed. A collective.

        Args:
            has_failed: Whether it comes to no further collective because of an error of its own.
        """
        if not self.has_parted and not has_failed:
            self.place = "the end of the layer"
        self._meet(_FAILED if has_failed else _DONE)

    def _meet(self, code: int) -> None:
        if self.has_parted:  # others have gone on from here
            return
        codes = torch.tensor([code, -code], device=self._device)
        dist.all_reduce(codes, op=dist.ReduceOp.MAX, group=self._group)
        most, least = codes.tolist()
        self.has_parted = most != -least
        self.has_failed_elsewhere = self.has_parted and most == _FAILED != code
