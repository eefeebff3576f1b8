"""Attention kernels and ways to replace them: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def attention_replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Inside this context, functions of `torch.nn.functional` compute attention with `attention`.

    Needed for `multi_head_attention_forward`: a `TorchFunctionMode` sees that call, but not the attention inside it.

    Args:
        attention: Takes the arguments of `torch.nn.functional.scaled_dot_product_attention`.
    """
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Turn off the fast path of `nn.MultiheadAttention`, which has its own attention kernel that nothing can intercept.

    `torch.backends.mha.set_fastpath_enabled`, since 2.0; public, and here because it is a switch of the whole process.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


Block = Callable[..., tuple[Tensor, Tensor]]


def ring_attention(
    block: Block, query: Tensor, key: Tensor, value: Tensor, group: Any, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Run `block` with the keys and values of each rank in turn, and merge the results. A collective over `group`.

    `torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention`, which balances the
    work under a causal mask; since 2.4. The public function replaces attention in the whole process, and does not run
    on gloo.

    Args:
        block: Attention of this rank's queries to one rank's keys; returns the output and the log-sum-exp.
        query: `[batch, heads, part, dim]`.
        key: `[batch, heads of keys, part, dim]`.
        value: As `key`.
        group: The ranks that share the sequence.
        is_causal: Whether queries see earlier positions only.

    Returns:
        The output, as `query`, and the log-sum-exp of the scores, `[batch, heads, part]`.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    with _ring_options(query.dtype, balances=is_causal):
        output, sums, *_ = _attention._templated_ring_attention(group, 2, block, query, key, value, is_causal)
    return output, sums


def ring_attention_backward(
    block_backward: Callable[..., tuple[Tensor, ...]],
    gradient: Tensor,
    saved: Sequence[Tensor],
    group: Any,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `ring_attention`. A collective over `group`.

    `_templated_ring_attention_backward`, since 2.4.

    Args:
        block_backward: Backward of one block; returns the gradients of its queries, keys and values.
        gradient: Of the output, `[batch, heads, part, dim]`.
        saved: Queries, keys, values, the output and the log-sum-exp, as `ring_attention` took and returned them.
        group: The ranks that share the sequence.
        is_causal: As in forward.

    Returns:
        The gradients of queries, keys and values.
    """
    from torch.distributed.tensor.experimental._context_parallel import _attention

    query, key, value, output, sums = saved
    with _ring_options(gradient.dtype, balances=is_causal):
        grad_query, grad_key, grad_value, *_ = _attention._templated_ring_attention_backward(
            group, 2, block_backward, gradient, "grad_out", query, key, value, output, sums, is_causal
        )
    return grad_query, grad_key, grad_value


@contextlib.contextmanager
def _ring_options(dtype: torch.dtype, *, balances: bool) -> Iterator[None]:
    """Set `_cp_options`, which are global: sums in fp32 (fp64 for fp64), and keys from one neighbour at a time."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    options = _attention._cp_options
    before = dict(vars(options))
    options.convert_to_f32 = dtype != torch.float64
    options.enable_load_balance = balances
    options.rotate_method = _attention._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        vars(options).update(before)


def has_flash_attention(query: Tensor, value: Tensor) -> bool:
    """Whether there is an attention kernel for tensors like these that returns the log-sum-exp.

    Args:
        query: `[batch, heads, length, dim]`.
        value: `[batch, heads, length, dim]`.
    """
    if query.shape[-1] != value.shape[-1]:
        return False
    # The CPU kernel divides by the numbers of samples, heads and positions: a crash where one is 0.
    if 0 in (query.numel(), value.numel()):
        return False
    if query.device.type == "cpu":
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    # Limits of the CUDA kernel: half precision, and head dimensions in multiples of 8 up to 256.
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention with the flash kernel of the device, without dropout.

    `_scaled_dot_product_flash_attention`, since 2.0, and `..._for_cpu`, since 2.2; no public function returns the
    log-sum-exp, without which blocks cannot be merged.

    Args:
        query: `[batch, heads, length, dim]`.
        key: As `query`; the kernel has no grouped heads.
        value: As `query`.
        is_causal: Whether queries see earlier positions only.
        scale: Factor of the products of queries and keys.

    Returns:
        The output, as `query`, and the log-sum-exp of the scores, `[batch, heads, length]`.
    """
    ops = torch.ops.aten
    kernel = ops._scaled_dot_product_flash_attention
    kernel = ops._scaled_dot_product_flash_attention_for_cpu if query.device.type == "cpu" else kernel
    output, sums, *_ = kernel(query, key, value, 0.0, is_causal, scale=scale)
    return output, sums


def flash_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `flash_attention`.

    Args:
        gradient: Of the output, `[batch, heads, length, dim]`.
        query: As in forward, and so are `key` and `value`.
        key: See `query`.
        value: See `query`.
        output: Of forward.
        sums: The log-sum-exp, `[batch, heads, length]`.
        is_causal: As in forward.
        scale: As in forward.

    Returns:
        The gradients of queries, keys and values.
    """
    ops, tensors = torch.ops.aten, (gradient, query, key, value, output, sums)
    if query.device.type == "cpu":
        gradients = ops._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
    else:
        # Cumulative lengths are for packed sequences only; here all sequences of a batch have the same length.
        lengths = (None, None, query.shape[2], key.shape[2])
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        gradients = ops._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, is_causal, *no_dropout, scale=scale
        )
    grad_query, grad_key, grad_value = gradients
    return grad_query, grad_key, grad_value
