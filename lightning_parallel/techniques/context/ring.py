"""Ring attention: queries stay, keys and values go round the ranks.

Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers". The number of heads need not divide by the ranks,
grouped heads of keys and values are sent before they are repeated, and no rank ever has the keys of a whole sequence.
Sequences are folded (Grattafiori et al. 2024, "The Llama 3 Herd of Models", 3.3.2), so that ranks have equal work under
a causal mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.techniques.context.masked_ring import (
    attend_under_mask,
    columns_of_mask,
    mask_violations,
    rows_of_mask,
)
from lightning_parallel.techniques.context.sequences import Sequences


def attend(
    sequences: Sequences,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `scaled_dot_product_attention` on parts of sequences, in a ring. A collective.

    Args:
        sequences: The ranks, and the lengths of parts.
        query: `[batch, heads, part, dim]`.
        key: `[batch, heads of keys, part, dim]`.
        value: As `key`.
        attn_mask: `[..., queries, keys]`, of parts or of whole sequences; true where attention is allowed, or added.
        dropout_p: The probability with which attention weights become zero; each rank draws for its own queries.
        is_causal: Whether queries see earlier positions only.
        scale: Factor of the products of queries and keys; by default ``dim ** -0.5``.
        enable_gqa: Whether there may be fewer heads of keys than of queries; a ring always allows it.

    Returns:
        As `query`.

    Raises:
        ConfigurationError: For anything that a ring cannot compute, with all reasons.
    """
    if violations := _violations(sequences, query, key, attn_mask, is_causal):
        raise ConfigurationError(violations)
    mask = None if attn_mask is None else rows_of_mask(sequences, _in_autocast(attn_mask), query)
    batch = max(each.shape[0] for each in (query, key, value, mask) if each is not None)
    query, key, value = (_as_attention_does(each, batch) for each in (query, key, value))
    if not sequences.is_part(key.shape[2]):  # whole on every rank already, such as keys of learned slots
        sequences.lengths.taken.add(key.shape[2])
        return scaled_dot_product_attention(query, key, value, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)
    is_padded = key.shape[2] * sequences.num_ranks != sequences.whole_length(key.shape[2])
    if mask is None and not dropout_p and (is_causal or not is_padded):  # under is_causal, padding is later than all
        return attend_in_ring(query, key, value, sequences.group, is_causal=is_causal, scale=scale)
    if is_causal:  # torch's kernels have no dropout that tells the sums by which a ring merges blocks
        length = sequences.whole_length(key.shape[2])
        earlier = torch.ones(length, length, dtype=torch.bool, device=key.device).tril()
        mask = rows_of_mask(sequences, earlier, query)
    mask = columns_of_mask(sequences, mask, key)
    return attend_under_mask(query, key, value, mask, sequences.group, scale=scale, dropout=dropout_p)


def _as_attention_does(states: Tensor, batch: int) -> Tensor:
    """Bring a tensor to the dtype of autocast, one batch size and contiguous memory, as attention itself would.

    Collectives and kernels below work outside of autocast and without broadcasting.
    """
    return _in_autocast(states).expand(batch, -1, -1, -1).contiguous()


def _in_autocast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _violations(sequences: Sequences, query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> list[str]:
    start, instead = "context_attention='ring'", "give context_attention='ulysses'"
    if query.ndim != 4:
        return [f"{start} needs attention over [batch, heads, length, dim], but got {tuple(query.shape)}; {instead}"]
    if not sequences.is_part(query.shape[2]):
        return [f"{start} needs queries that are a part of a sequence, but got {query.shape[2]} of them; {instead}"]
    found = []
    if mask is not None:
        found += mask_violations(sequences, mask, query, key)
        if is_causal:  # torch refuses it, too
            found.append(f"{start}: attention is given a mask and is_causal=True; give one of the two")
    if query.shape[1] % key.shape[1]:
        found.append(
            f"{start} needs a number of heads that the {key.shape[1]} heads of keys divide, but queries have "
            f"{query.shape[1]}; {instead}"
        )
    if is_causal and query.shape[2] != key.shape[2]:
        found.append(
            f"{start} needs as many queries as keys under is_causal, but a part has {query.shape[2]} and "
            f"{key.shape[2]}; {instead}"
        )
    return found


@_torch.modes.not_compiled
def attend_in_ring(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks in `group`. A collective.

    Args:
        query: `[batch, heads, part, dim]`, folded.
        key: `[batch, heads of keys, part, dim]`, folded; their number divides that of `query`.
        value: As `key`.
        group: The ranks that share the sequence.
        is_causal: Whether queries see earlier positions only.
        scale: Factor of the products of queries and keys; by default ``dim ** -0.5``.

    Returns:
        As `query`.
    """
    attended: Tensor = _Ring.apply(query, key, value, group, is_causal, scale)
    return attended


class _Ring(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: ProcessGroup,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        block = _Block(query.shape[1] // key.shape[1], query.shape[3] ** -0.5 if scale is None else scale)
        output, sums = _torch.attention.ring_attention(block.forward, query, key, value, group, is_causal=is_causal)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.block, ctx.group, ctx.is_causal = block, group, is_causal
        return output

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = _torch.attention.ring_attention_backward(
            ctx.block.backward,
            gradients[0].contiguous(),
            ctx.saved_tensors,
            ctx.group,
            is_causal=ctx.is_causal,
        )
        return *found, None, None, None


class _Block:
    """Attention of the queries of one rank to the keys of another, with the log-sum-exp by which blocks are merged.

    Args:
        repeats: Heads of queries for each head of keys.
        scale: Factor of the products of queries and keys.
    """

    def __init__(self, repeats: int, scale: float) -> None:
        self._repeats = repeats
        self._scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> tuple[Tensor, Tensor]:
        key, value = (each.repeat_interleave(self._repeats, 1) for each in (key, value))
        if _torch.attention.has_flash_attention(query, value):
            return _torch.attention.flash_attention(query, key, value, is_causal=is_causal, scale=self._scale)
        scores = self._scores(query, key, is_causal=is_causal)
        return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1)

    def backward(
        self,
        *,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the gradients of queries, keys and values of one block.

        Args:
            grad_out: Gradient of `out`.
            query: `[batch, heads, part, dim]`.
            key: `[batch, heads of keys, part, dim]`.
            value: As `key`.
            out: The output over all blocks, as `query`.
            logsumexp: Over all blocks, `[batch, heads, part]`.
            is_causal: Whether the block is on the diagonal, where queries see earlier positions only.

        Returns:
            The gradients, each as its tensor.
        """
        keys, values = (each.repeat_interleave(self._repeats, 1) for each in (key, value))
        if _torch.attention.has_flash_attention(query, value):
            found = _torch.attention.flash_attention_backward(
                grad_out, query, keys, values, out, logsumexp, is_causal=is_causal, scale=self._scale
            )
        else:
            found = self._gradients(grad_out, query, keys, values, out, logsumexp, is_causal=is_causal)
        grad_query, *others = found
        grad_key, grad_value = (each.unflatten(1, (-1, self._repeats)).sum(2) for each in others)
        return grad_query, grad_key, grad_value

    def _scores(self, query: Tensor, key: Tensor, *, is_causal: bool) -> Tensor:
        scores = (query @ key.transpose(-1, -2)).to(torch.promote_types(query.dtype, torch.float32)) * self._scale
        if not is_causal:
            return scores
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, float("-inf"))

    def _gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self._scores(query, key, is_causal=is_causal) - sums.unsqueeze(-1)).exp()
        d_weights = (gradient @ value.transpose(-1, -2)).to(weights.dtype)
        delta = (gradient * out).sum(-1, keepdim=True, dtype=weights.dtype)
        d_scores = (weights * (d_weights - delta) * self._scale).to(query.dtype)
        weights = weights.to(query.dtype)
        return d_scores @ key, d_scores.transpose(-1, -2) @ query, weights.transpose(-1, -2) @ gradient
