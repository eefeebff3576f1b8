"""Splitting of sequences into the parts of ranks, and joining of parts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_parallel.module.hidden_states import Lengths
from lightning_parallel.ranks.collectives import copy_to, gather_from, padded, scatter_to


class Sequences:
    """The ranks that share sequences, and the lengths of the sequences in a stack at the moment.

    One object is shared by all layers of a stack.

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
        """The dimension of hidden states that is the sequence."""
        return self.lengths.dim

    def is_part(self, length: int) -> bool:
        """Whether a dimension of size `length` is that of a part."""
        return length in self.lengths.whole

    def whole_length(self, length: int) -> int:
        """Length of the sequence whose parts have `length` positions; `length` itself if nothing was split so."""
        return self.lengths.whole.get(length, length)

    def has_any(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is true on any of the ranks. A collective.

        Args:
            flag: This rank's.
            device: The device of the process group.
        """
        found = torch.tensor(int(flag), device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return bool(found)

    def averaged(self, gradients: list[Tensor]) -> list[Tensor]:
        """Gradients of parameters as training reduces those of parts: the mean over the ranks. An all-reduce."""
        wide = torch.float64 if any(each.dtype == torch.float64 for each in gradients) else torch.float32
        together = torch.cat([each.to(wide).flatten() for each in gradients])
        dist.all_reduce(together, group=self.group)
        parts = (together / self.num_ranks).split([each.numel() for each in gradients])
        return [part.view(each.shape).to(each.dtype) for part, each in zip(parts, gradients, strict=True)]

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """Take this rank's part, padded with zeros. Backward gathers the gradients of all parts.

        Args:
            whole: A tensor that is equal on all ranks.
            dim: The dimension along which it is split.
        """
        local = self.lengths.add(whole.shape[dim])
        # Gradients of parameters are averaged over these ranks afterwards, so each part of the loss has to count as
        # often as there are ranks: `join` multiplies gradients by their number, and this divides by it again.
        if self.folds:
            whole = _folded(padded(whole, dim, local * self.num_ranks), dim, self.num_ranks)
        return scatter_to(whole, dim, self.group, local=local, scale=1 / self.num_ranks)

    def join(self, part: Tensor, dim: int) -> Tensor:
        """Join the parts of all ranks, without padding. An all-gather.

        Args:
            part: This rank's part.
            dim: The dimension along which it was split.
        """
        length = self.whole_length(part.shape[dim])
        if not self.folds:
            return gather_from(part, dim, self.group, length=length, scale=self.num_ranks)
        whole = gather_from(part, dim, self.group, scale=self.num_ranks)
        return _unfolded(whole, dim, self.num_ranks).narrow(dim, 0, length)

    def in_order_of_ranks(self, whole: Tensor, dim: int, *, local: int, fill: float) -> Tensor:
        """Reorder `whole` so that the parts of ranks stand one after the other. Not a collective.

        Args:
            whole: A tensor that is equal on all ranks.
            dim: The dimension along which parts are taken.
            local: Their length.
            fill: What stands in the place of padding.
        """
        missing = local * self.num_ranks - whole.shape[dim]
        if missing:
            shape = [*whole.shape[:dim], missing, *whole.shape[dim + 1 :]]
            whole = torch.cat([whole, whole.new_full(shape, fill)], dim)
        return _folded(whole, dim, self.num_ranks) if self.folds else whole

    def share(self, value: Tensor) -> Tensor:
        """Use a whole tensor on every rank: identity forward, mean all-reduce backward."""
        return copy_to(value, self.group, scale=1 / self.num_ranks) if value.requires_grad else value


def _folded(whole: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Reorder pieces 0 to 2n - 1 as 0, 2n - 1, 1, 2n - 2...: the part of rank r is pieces r and 2n - 1 - r."""
    pieces = whole.chunk(2 * num_ranks, dim)
    return torch.cat([pieces[i] for rank in range(num_ranks) for i in (rank, 2 * num_ranks - 1 - rank)], dim)


def _unfolded(whole: Tensor, dim: int, num_ranks: int) -> Tensor:
    pieces = whole.chunk(2 * num_ranks, dim)
    return torch.cat([*pieces[0::2], *reversed(pieces[1::2])], dim)
