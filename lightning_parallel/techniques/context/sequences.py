"""How sequences are cut into the parts of ranks, and joined again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.module.hidden_states import Lengths
from lightning_parallel.ranks.collectives import copy_to, gather_from, padded, scatter_to


class Sequences:
    """What the layers of one stack share: the ranks, and how the sequences are cut that run through it now.

    Args:
        group: The ranks that share a sequence.
        folds: Whether a rank's part is two pieces, one as far from the beginning as the other from the end. Under a
            causal mask, all ranks then have the same work.
    """

    def __init__(self, group: ProcessGroup, *, folds: bool = False) -> None:
        self.group = group
        self.num_ranks = group.size()
        self.rank = group.rank()
        self.folds = folds
        self.lengths = Lengths(self.num_ranks, multiple=2 if folds else 1)

    @property
    def dim(self) -> int:
        """Which dimension of hidden states is the sequence."""
        return self.lengths.dim

    def is_part(self, length: int) -> bool:
        """Whether something of `length` is a part of a sequence that was cut."""
        return length in self.lengths.whole

    def whole_length(self, length: int) -> int:
        """The length of the sequence of which a part has `length`; `length` itself where nothing was cut."""
        return self.lengths.whole.get(length, length)

    def has_any(self, flag: bool, device: torch.device) -> bool:
        """Whether any of the ranks has `flag`. An all-reduce."""
        found = torch.tensor(int(flag), device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's part of `whole` along `dim`, padded with zeros."""
        local = self.lengths.add(whole.shape[dim])
        if self.folds:
            whole = _folded(padded(whole, dim, local * self.num_ranks), dim, self.num_ranks)
        return scatter_to(whole, dim, self.group, local=local, scale=1 / self.num_ranks)

    def join(self, part: Tensor, dim: int) -> Tensor:
        """The parts of all ranks along `dim`, without padding. An all-gather."""
        length = self.whole_length(part.shape[dim])
        if not self.folds:
            return gather_from(part, dim, self.group, length=length, scale=self.num_ranks)
        whole = gather_from(part, dim, self.group, scale=self.num_ranks)
        return _unfolded(whole, dim, self.num_ranks).narrow(dim, 0, length)

    def share(self, value: Tensor) -> Tensor:
        """`value`, whole on every rank, of which each uses something else: identity forward, mean backward."""
        return copy_to(value, self.group, scale=1 / self.num_ranks) if value.requires_grad else value


def _folded(whole: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Pieces 0 to 2n - 1 in the order 0, 2n - 1, 1, 2n - 2...: the part of rank r is pieces r and 2n - 1 - r."""
    pieces = whole.chunk(2 * num_ranks, dim)
    return torch.cat([pieces[i] for rank in range(num_ranks) for i in (rank, 2 * num_ranks - 1 - rank)], dim)


def _unfolded(whole: Tensor, dim: int, num_ranks: int) -> Tensor:
    pieces = whole.chunk(2 * num_ranks, dim)
    return torch.cat([*pieces[0::2], *reversed(pieces[1::2])], dim)
