"""Ring attention under a mask, or with dropout: a rank takes its rows of the mask, and columns of keys that come round.

Torch's ring merges blocks by the logarithms of their sums, which are no numbers where a block is masked out as a whole,
and do not tell apart what a mask of the smallest number has pushed down. Here, largest scores and sums are kept apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.ranks.collectives import gather_from_sequence
from lightning_parallel.techniques.context.sequences import Sequences


def mask_violations(sequences: Sequences, mask: Tensor, query: Tensor, key: Tensor) -> list[str]:
    """Reasons why a mask cannot be divided as queries and keys are; empty if it can.

    Args:
        sequences: The ranks, and the lengths of parts.
        mask: What attention is given.
        query: `[batch, heads, part, dim]`.
        key: `[batch, heads of keys, part, dim]`.
    """
    lengths = [{1, each.shape[2], sequences.whole_length(each.shape[2])} for each in (query, key)]
    sizes = (1, 1, *mask.shape)[-2:]
    if mask.ndim <= 4 and all(size in legal for size, legal in zip(sizes, lengths, strict=True)):
        return []
    whole = [sequences.whole_length(each.shape[2]) for each in (query, key)]
    return [
        f"context_attention='ring' needs masks of [batch, heads, queries, keys], of parts or of whole sequences, but a "
        f"mask is {tuple(mask.shape)} where there are {query.shape[2]} of {whole[0]} queries and {key.shape[2]} of "
        f"{whole[1]} keys; give a mask of these sizes, or context_attention='ulysses'"
    ]


def rows_of_mask(sequences: Sequences, mask: Tensor, query: Tensor) -> Tensor:
    """Take the rows of this rank's queries.

    Args:
        sequences: The ranks, and the lengths of parts.
        mask: Of up to four dimensions; true where attention is allowed, or added.
        query: `[batch, heads, part, dim]`.

    Returns:
        `[batch or 1, heads or 1, part or 1, keys]`.
    """
    mask, local = mask[(None,) * (4 - mask.ndim)], query.shape[2]
    if mask.shape[2] != 1 and mask.shape[2] == sequences.whole_length(local):
        # Rows of padding, which nobody reads, see whatever there is.
        return sequences.in_order_of_ranks(mask, 2, local=local, fill=0).chunk(sequences.num_ranks, 2)[sequences.rank]
    return mask


def columns_of_mask(sequences: Sequences, mask: Tensor | None, key: Tensor) -> Tensor:
    """Bring the columns of a mask into the order of ranks, with those of padding masked out. May be a collective.

    Args:
        sequences: The ranks, and the lengths of parts.
        mask: `[..., keys]`, of a part, of the whole sequence, or one for all keys; ``None`` if there is none.
        key: `[batch, heads of keys, part, dim]`.

    Returns:
        `[..., ranks * part]`.
    """
    local = key.shape[2]
    length = sequences.whole_length(local)
    if mask is None:
        mask = key.new_ones((1, 1, 1, 1), dtype=torch.bool)
    hidden = 0 if mask.dtype == torch.bool else float("-inf")
    if mask.shape[-1] == 1:
        mask = mask.expand(*mask.shape[:-1], length)
    if mask.shape[-1] == length:
        return sequences.in_order_of_ranks(mask, mask.ndim - 1, local=local, fill=hidden)
    mask = gather_from_sequence(mask, mask.ndim - 1, sequences.group)
    if local * sequences.num_ranks == length:
        return mask
    is_there = torch.ones(length, dtype=torch.bool, device=mask.device)
    is_there = sequences.in_order_of_ranks(is_there, 0, local=local, fill=0)
    return mask & is_there if mask.dtype == torch.bool else mask.masked_fill(~is_there, hidden)


@_torch.modes.not_compiled
def attend_under_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    group: ProcessGroup,
    *,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks in `group`, under a mask. A collective.

    Args:
        query: `[batch, heads, part, dim]`.
        key: `[batch, heads of keys, part, dim]`; their number divides that of `query`.
        value: As `key`.
        mask: `[batch or 1, heads or 1, part or 1, ranks * part]`, its columns in the order of ranks; true where
            attention is allowed, or added to the scores. A row without any key gives zeros, as in torch.
        group: The ranks that share the sequence.
        scale: Factor of the products of queries and keys; by default ``dim ** -0.5``.
        dropout: The probability with which a weight becomes zero. Each rank draws for its queries, once from the
            default generator of the host.

    Returns:
        As `query`, with the width of `value`.
    """
    scale = query.shape[3] ** -0.5 if scale is None else scale
    attended: Tensor = _MaskedRing.apply(query, key, value, mask, group, scale, _Dropout.drawn(dropout, query))
    return attended


@dataclass(frozen=True)
class _Dropout:
    """The choice of attention weights that are dropped: backward draws it again, so that nobody keeps it.

    Args:
        probability: With which a weight is dropped.
        seed: Of the numbers that are drawn.
        device: Where they are drawn.
    """

    probability: float
    seed: int
    device: torch.device

    @classmethod
    def drawn(cls, probability: float, query: Tensor) -> _Dropout | None:
        """With a seed of the host's generator, so that no device is waited for; ``None`` without dropout."""
        return cls(probability, int(torch.randint(2**62, (), device="cpu")), query.device) if probability else None

    def factors(self, weights: Tensor, source: int) -> Tensor:
        """Of each weight: zero, or what keeps the mean.

        Args:
            weights: `[batch, heads, part, part of keys]`.
            source: The rank whose keys they are of.
        """
        if self.probability == 1:
            return torch.zeros_like(weights)
        generator = torch.Generator(self.device).manual_seed(self.seed + source)
        kept = torch.empty_like(weights).bernoulli_(1 - self.probability, generator=generator)
        return kept.div_(1 - self.probability)


class _MaskedRing(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        group: ProcessGroup,
        scale: float,
        dropout: _Dropout | None,
    ) -> Tensor:
        rows = _Rows(query, mask, scale, query.shape[1] // key.shape[1])
        largest = rows.wide(query.new_full((*query.shape[:3], 1), float("-inf")))
        sums, total = torch.zeros_like(largest), rows.wide(query.new_zeros((*query.shape[:3], value.shape[3])))
        for source, (keys, values) in _round(group, key, value):
            scores, values = rows.scores(keys, source), rows.repeated(values)
            before, largest = largest, torch.maximum(largest, scores.amax(-1, keepdim=True))
            base = _finite(largest)
            weights, decay = (scores - base).exp(), (before - base).exp()
            sums = sums * decay + weights.sum(-1, keepdim=True)
            if dropout is not None:  # of weights, whose sum is that of all
                weights = weights * dropout.factors(weights, source)
            total = total * decay + rows.wide(weights.to(values.dtype) @ values)
        sums = sums.masked_fill(sums == 0, 1.0)
        output = (total / sums).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, _finite(largest), sums)
        ctx.group, ctx.scale, ctx.dropout = group, scale, dropout
        return output

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, mask, output, base, sums = ctx.saved_tensors
        rows = _Rows(query, mask, ctx.scale, query.shape[1] // key.shape[1])
        gradient = gradients[0].contiguous()
        delta = rows.wide(gradient * output).sum(-1, keepdim=True)
        grad_query = torch.zeros_like(rows.wide(query))
        of_mask = rows.wide(torch.zeros_like(mask)) if ctx.needs_input_grad[3] else None
        others = torch.cat([torch.zeros_like(rows.wide(each)).flatten() for each in (key, value)])
        sending = None
        for source, (keys, values) in _round(ctx.group, key, value):
            repeated, values = rows.repeated(keys), rows.repeated(values)
            weights = (rows.scores(keys, source) - base).exp() / sums
            d_weights = rows.wide(gradient @ values.transpose(-1, -2))
            factors = None if ctx.dropout is None else ctx.dropout.factors(weights, source)
            d_scores = weights * ((d_weights if factors is None else d_weights * factors) - delta)
            weights = weights if factors is None else weights * factors
            if of_mask is not None:
                block = of_mask.narrow(-1, source * keys.shape[2], keys.shape[2])
                block += d_scores.sum_to_size(block.shape)
            narrow = (d_scores * ctx.scale).to(query.dtype)
            grad_query += narrow @ repeated
            grad_key = rows.summed(narrow.transpose(-1, -2) @ query)
            grad_value = rows.summed(weights.to(query.dtype).transpose(-1, -2) @ gradient)
            others = others if sending is None else sending.received()
            others = others + torch.cat([grad_key.flatten(), grad_value.flatten()])
            sending = _Sending(others, ctx.group)  # after all of the ranks, they are at home
        assert sending is not None
        grad_key, grad_value = (
            part.view(each.shape).to(each.dtype)
            for part, each in zip(sending.received().split([key.numel(), value.numel()]), (key, value), strict=True)
        )
        of_mask = None if of_mask is None else of_mask.to(mask.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, of_mask, None, None, None


@dataclass(frozen=True)
class _Rows:
    """The queries of this rank, and their rows of the mask.

    Args:
        query: `[batch, heads, part, dim]`.
        mask: `[batch or 1, heads or 1, part or 1, ranks * part]`.
        scale: Factor of the products of queries and keys.
        repeats: Heads of queries for each head of keys.
    """

    query: Tensor
    mask: Tensor
    scale: float
    repeats: int

    def wide(self, tensor: Tensor) -> Tensor:
        """In fp32, or in fp64 where queries are: what is summed over blocks."""
        return tensor.to(torch.promote_types(self.query.dtype, torch.float32))

    def repeated(self, states: Tensor) -> Tensor:
        """Keys or values, one for each head of queries."""
        return states.repeat_interleave(self.repeats, 1)

    def summed(self, gradient: Tensor) -> Tensor:
        """The gradient of what was repeated."""
        heads = gradient.shape[1] // self.repeats
        return self.wide(gradient).view(gradient.shape[0], heads, self.repeats, *gradient.shape[2:]).sum(2)

    def scores(self, keys: Tensor, source: int) -> Tensor:
        """`[batch, heads, part, part of keys]` for the keys of one rank."""
        scores = self.wide(self.query @ self.repeated(keys).transpose(-1, -2)) * self.scale
        mask = self.mask.narrow(-1, source * keys.shape[2], keys.shape[2])
        return scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + self.wide(mask)


def _finite(largest: Tensor) -> Tensor:
    """The number that is subtracted from scores: zero where no key was seen, so that they stay what they are."""
    return largest.masked_fill(largest == float("-inf"), 0.0)


class _Sending:
    """A tensor on its way to the next rank of a ring, and another one from the rank before.

    Args:
        tensor: Of the same size on all ranks.
        group: The ranks, in the order of the ring.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent = tensor.contiguous()  # held until it has left
        self._received = torch.empty_like(self._sent)
        to, of = ([tensor.numel() if other == (rank + way) % size else 0 for other in range(size)] for way in (1, -1))
        self._work = dist.all_to_all_single(
            self._received.view(-1), self._sent.view(-1), of, to, group=group, async_op=True
        )

    def received(self) -> Tensor:
        """The tensor from the rank before."""
        self._work.wait()
        return self._received


def _round(group: ProcessGroup, *tensors: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """The tensors of each rank in turn, this rank's own first; the next ones travel meanwhile. A collective."""
    sizes = [tensor.numel() for tensor in tensors]
    together = torch.cat([tensor.flatten() for tensor in tensors])
    for step in range(group.size()):
        sending = _Sending(together, group) if step < group.size() - 1 else None
        parts = together.split(sizes)
        yield (group.rank() - step) % group.size(), [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)]
        if sending is not None:
            together = sending.received()
