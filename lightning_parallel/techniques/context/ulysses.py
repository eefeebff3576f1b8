"""Ulysses: around attention, ranks exchange positions for heads.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses". Each rank attends over whole sequences with its part of the heads: four
all-to-alls forward, four backward.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.collectives import all_to_all
from lightning_parallel.ranks.divisibility import degrees_for_heads, listed
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
    """Compute `scaled_dot_product_attention` on parts of sequences, each rank with some of the heads. A collective.

    Args:
        sequences: The ranks, and the lengths of parts.
        query: `[batch, heads, part, dim]`.
        key: `[batch, heads of keys, part, dim]`.
        value: As `key`.
        attn_mask: `[..., queries, keys]`, of parts or of whole sequences.
        dropout_p: Probability with which attention weights are dropped.
        is_causal: Whether queries see earlier positions only.
        scale: Factor of the products of queries and keys; by default ``dim ** -0.5``.
        enable_gqa: Whether there may be fewer heads of keys than of queries; always allowed here.

    Returns:
        As `query`.

    Raises:
        ConfigurationError: If the ranks cannot share the heads.
    """
    num_ranks = sequences.num_ranks
    if violation := _head_violation(query, key, num_ranks):
        raise ConfigurationError([violation])
    # With fewer heads of keys than ranks, heads are repeated so that each rank gets the one that its queries need.
    repeats = max(1, num_ranks // key.shape[1])
    mask = None if attn_mask is None else _mask(sequences, attn_mask, query, key)
    q = _heads_for_positions(sequences, query, 1)
    k, v = (_heads_for_positions(sequences, each, repeats) for each in (key, value))
    enable_gqa = q.shape[1] != k.shape[1]
    output = scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    padding = query.shape[2] * num_ranks - output.shape[2]
    return all_to_all(F.pad(output, (0, 0, 0, padding)), 2, 1, sequences.group)


def _heads_for_positions(sequences: Sequences, states: Tensor, repeats: int) -> Tensor:
    """Exchange positions for heads: `[batch, heads, part, dim]` to `[batch, heads / ranks, length, dim]`."""
    if repeats > 1:
        states = states.repeat_interleave(repeats, 1)
    if not sequences.is_part(states.shape[2]):  # whole on every rank already, such as keys of learned slots
        sequences.lengths.taken.add(states.shape[2])
        return states.chunk(sequences.num_ranks, 1)[sequences.rank]
    return all_to_all(states, 1, 2, sequences.group).narrow(2, 0, sequences.whole_length(states.shape[2]))


def _mask(sequences: Sequences, mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Bring a mask to whole sequences and this rank's heads."""
    for dim, states in ((-1, key), (-2, query)):
        local = states.shape[2]
        if mask.ndim >= -dim and mask.shape[dim] == local != sequences.whole_length(local):
            mask = sequences.join(mask, mask.ndim + dim)
    if mask.ndim == 4 and mask.shape[1] == query.shape[1] > 1:
        mask = mask.chunk(sequences.num_ranks, 1)[sequences.rank]
    return mask


def _head_violation(query: Tensor, key: Tensor, num_ranks: int) -> str:
    if query.ndim != 4:
        return (
            f"context={num_ranks} needs attention over [batch, heads, length, dim], but got {tuple(query.shape)}; "
            "bring queries, keys and values into that shape, or give context=1"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    legal = degrees_for_heads(heads, kv_heads)
    if num_ranks in legal:
        return ""
    return (
        f"context={num_ranks} cannot share {heads} heads and {kv_heads} heads of keys and values (those that tensor "
        "parallel has left to a rank, if there is any); possible: "
        f"{listed(legal)}; attention needs no division of heads with "
        "context_attention='ring'"
    )
