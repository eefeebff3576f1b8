"""Attention over some of the heads: each rank attends with its own."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_parallel import _torch
from lightning_parallel.errors import ConfigurationError
from lightning_parallel.ranks.collectives import gather_from_sequence, reduce_from
from lightning_parallel.ranks.dtensors import full_of
from lightning_parallel.techniques.tensor.dtensor_gradients import contiguous_backward
from lightning_parallel.techniques.tensor.regions import ReplicatedRegion

_BACKWARD = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_attention = F.scaled_dot_product_attention


class HeadSplit(TorchFunctionMode):
    """Mode in which operations may mix DTensors and tensors, and attention over DTensors is over this rank's heads.

    A tensor that meets a DTensor is whole and equal on every rank; its gradient is summed over them.

    Args:
        mesh: The ranks that share the heads.
        region: Converts whole tensors to DTensors with the right gradient.
    """

    def __init__(self, mesh: DeviceMesh, region: ReplicatedRegion) -> None:
        super().__init__()
        self._mesh = mesh
        self._region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: Any = (*args, *kwargs.values())
        if any(isinstance(value, tuple | list | dict) for value in given):  # looking into each takes longer
            given = tree_leaves(given)
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        has_parts = any(isinstance(tensor, DTensor) for tensor in tensors)
        if func is _attention and has_parts:
            return self._attend(*args, **kwargs)
        # Backward needs the tensors themselves, since copies are not in its graph.
        if func in _BACKWARD:
            return func(*args, **kwargs)
        if has_parts and not all(isinstance(tensor, DTensor) for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, self._as_whole, (args, kwargs))
        if not has_parts:
            return func(*args, **kwargs)
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            # Torch has no sharding rule for this operation, so it runs on whole tensors. An error that is the user's
            # own comes again.
            args, kwargs = tree_map_only(DTensor, self._gathered, (args, kwargs))
            return func(*args, **kwargs)

    def _gathered(self, tensor: Any) -> Tensor:
        whole: Tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        return whole

    def _as_whole(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, DTensor):
            return tensor
        return self._region.as_dtensor(tensor, self._mesh)

    # Not compiled: queries, keys and values differ in strides, and the compiler assumes those of the first.
    @_torch.modes.not_compiled
    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        heads, dim = query.shape[-3], query.ndim - 3
        q = self._own_heads(query)
        k, v = (self._heads_for(states, heads) for states in (key, value))
        mask = None if attn_mask is None else self._mask(attn_mask, heads)
        output = _attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=k.shape[-3] != q.shape[-3])
        return DTensor.from_local(output.contiguous(), self._mesh, [Shard(dim)], run_check=False)

    def _own_heads(self, states: Tensor) -> Tensor:
        parts: Any = self._as_whole(states).contiguous()
        dim = states.ndim - 3
        # A third of a fused map, for example, is whole: the parts of the map were not heads.
        if parts.placements[0].is_replicate():
            whole = contiguous_backward(parts.to_local(grad_placements=[Partial()]))
            return whole.chunk(self._mesh.size(), dim)[self._mesh.get_local_rank()]
        return contiguous_backward(parts.redistribute(placements=[Shard(dim)]).to_local())

    def _heads_for(self, states: Tensor, heads: int) -> Tensor:
        """Take the heads of keys or values that this rank's part of `heads` heads of queries attends to."""
        size, dim, kv_heads = self._mesh.size(), states.ndim - 3, states.shape[-3]
        if kv_heads % size == 0:
            return self._own_heads(states)
        # Fewer heads of keys than ranks: several ranks use the same one, so its gradient is summed over them.
        whole = self._region.copy_to(full_of(states))
        own = torch.arange(heads // size, device=whole.device) + self._mesh.get_local_rank() * (heads // size)
        return whole.index_select(dim, own * kv_heads // heads)

    def _mask(self, mask: Tensor, heads: int) -> Tensor:
        whole = full_of(mask)
        if whole.requires_grad:
            whole = self._region.copy_to(whole)
        if whole.ndim >= 3 and whole.shape[-3] == heads > 1:
            return whole.chunk(self._mesh.size(), -3)[self._mesh.get_local_rank()]
        return whole


def attend_multihead(
    attention: Any,
    region: ReplicatedRegion,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Compute `nn.MultiheadAttention.forward`, each rank with its part of the heads.

    Arguments that are not described here are as in that method.

    Args:
        attention: The module; its weights are split.
        region: The collectives by which hidden states enter and leave the branch.
        query: `[batch, length, width]`, `[length, batch, width]` or, without a batch, `[length, width]`.
        key: `[batch, keys, width]`, and so on.
        value: As `key`.
        key_padding_mask: `[batch, keys]`; true for padding, or added to the scores.
        need_weights: Whether attention weights are returned, averaged over heads.
        attn_mask: `[length, keys]` or `[batch * heads, length, keys]`; true where attention is not allowed, or added.
        average_attn_weights: Only ``True``.
        is_causal: A hint that `attn_mask` is causal, so that the mask itself is not needed.

    Returns:
        Hidden states as `query`, and weights `[batch, length, keys]` or ``None``.

    Raises:
        ConfigurationError: For weights of single heads, which no rank has all of.
    """
    if need_weights and not average_attn_weights:
        raise ConfigurationError([_WEIGHTS_OF_HEADS])
    is_batched, states = query.ndim == 3, [query, key, value]
    if not is_batched:
        states = [each.unsqueeze(0 if attention.batch_first else 1) for each in states]
    q, k, v = _projected(attention, region, states)
    is_causal = is_causal and key_padding_mask is None and not need_weights  # the same condition as in torch
    mask = None if is_causal else _merged(attn_mask, key_padding_mask, q, attention.num_heads, region.group)
    output, weights = _attend(attention, q, k, v, mask, region, need_weights=need_weights, is_causal=is_causal)
    whole = _project_out(attention, output, region)
    if not is_batched:
        whole = whole.squeeze(0 if attention.batch_first else 1)
        weights = None if weights is None else weights.squeeze(0)
    return whole, weights


def _attend(
    attention: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    region: ReplicatedRegion,
    *,
    need_weights: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention of this rank's heads, `[batch, heads / ranks, length, dim]`, and the mean of all heads' weights."""
    dropout = attention.dropout if attention.training else 0.0
    if not need_weights:
        return _attention(q, k, v, mask, dropout, is_causal), None
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    shares = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
    return shares @ v, reduce_from(shares.sum(1), region.group) / attention.num_heads


def _project_out(attention: Any, output: Tensor, region: ReplicatedRegion) -> Tensor:
    """Hidden states from this rank's heads, `[batch, heads / ranks, length, dim]`. One collective."""
    output = output.transpose(1, 2).flatten(2)
    output = output if attention.batch_first else output.transpose(0, 1)
    whole = region.row_output(F.linear(output, attention.out_proj.weight.to_local()))
    if attention.out_proj.bias is not None:
        whole = whole + attention.out_proj.bias.to(whole.dtype)
    return whole


def _projected(attention: Any, region: ReplicatedRegion, states: list[Tensor]) -> list[Tensor]:
    """Project to queries, keys and values of this rank's heads, `[batch, heads / ranks, length, dim]`."""
    if attention._qkv_same_embed_dim:
        weights = _thirds(attention.in_proj_weight, region.group)
    else:
        weights = [getattr(attention, f"{name}_proj_weight").to_local() for name in "qkv"]
    biases = [None] * 3 if attention.in_proj_bias is None else _thirds(attention.in_proj_bias, region.group)
    found = []
    for each, weight, bias in zip(states, weights, biases, strict=True):
        projected = F.linear(region.column_input(each), weight, bias)
        projected = projected if attention.batch_first else projected.transpose(0, 1)
        heads = attention.num_heads // region.group.size()
        found.append(projected.unflatten(-1, (heads, -1)).transpose(1, 2))
    return found


def _thirds(packed: DTensor, group: ProcessGroup) -> list[Tensor]:
    """Take this rank's rows for queries, for keys and for values from a packed weight, `[3 * width, ...]`.

    It is gathered first: an equal part of the packed rows is not a part of each third.
    """
    whole = gather_from_sequence(packed.to_local(), 0, group)
    return [third.chunk(group.size())[group.rank()] for third in whole.chunk(3)]


def _merged(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor, heads: int, group: ProcessGroup
) -> Tensor | None:
    """Merge both masks to one that is added: `[batch or 1, this rank's heads or 1, length, keys]`."""
    masks = []
    if attn_mask is not None:
        mask = _added(attn_mask, query.dtype)
        if mask.ndim == 3:
            mask = mask.view(query.shape[0], heads, *mask.shape[1:]).chunk(group.size(), 1)[group.rank()]
        masks.append(mask if mask.ndim == 4 else mask[None, None])
    if key_padding_mask is not None:
        padding = _added(key_padding_mask, query.dtype)
        masks.append(padding.view(query.shape[0], 1, 1, -1))
    return functools.reduce(torch.add, masks) if masks else None


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


_WEIGHTS_OF_HEADS = (
    "nn.MultiheadAttention with average_attn_weights=False is not split, for a rank has the weights of its own heads "
    "only; give need_weights=False, average_attn_weights=True, or tensor=1"
)
