"""Kernels of attention, and what replaces them: private or version-dependent names of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def attention_replaced(attention: Callable[..., Tensor]) -> Iterator[None]:
    """While this is open, functions of `torch.nn.functional` attend with `attention`.

    Inside of `multi_head_attention_forward`, a `TorchFunctionMode` that handles it sees no more calls.
    """
    original = nn.functional.scaled_dot_product_attention
    nn.functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = original


@contextlib.contextmanager
def slow_attention() -> Iterator[None]:
    """Without the fast path of `nn.MultiheadAttention`, which has an attention of its own.

    `torch.backends.mha.set_fastpath_enabled`, since 2.0; public, and here because it is a switch of the process.
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
    """Run `block` with the keys and values of each rank in turn; the merged output, and logarithms of sums.

    `torch.distributed.tensor.experimental._context_parallel._attention._templated_ring_attention`, with its balance of
    work under a causal mask; since 2.4. Its public spelling replaces all attention of the process, and knows no gloo.
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
    """Gradients of queries, keys and values, of which `saved` are those, the output and the logarithms of sums.

    `_templated_ring_attention_backward`, since 2.4.
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
    """`_cp_options`, which are of the process: sums in fp32 but for fp64, one neighbour's keys at a time."""
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
    """Whether there is a kernel of attention for tensors like these that returns logarithms of sums."""
    if query.shape[-1] != value.shape[-1]:
        return False
    if 0 in (query.numel(), value.numel()):  # the CPU's kernel divides by numbers of samples, heads and positions
        return False
    if query.device.type == "cpu":
        return hasattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu")
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return query.device.type == "cuda" and is_half and query.shape[-1] % 8 == 0 and query.shape[-1] <= 256


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The output and logarithms of sums, `[batch, heads, length]`.

    `_scaled_dot_product_flash_attention`, since 2.0, and `..._for_cpu`, since 2.2; no public spelling has the sums.
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
    """The gradients of queries, keys and values; `flash_attention` in backward."""
    ops, tensors = torch.ops.aten, (gradient, query, key, value, output, sums)
    if query.device.type == "cpu":
        gradients = ops._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, 0.0, is_causal, scale=scale)
    else:
        lengths = (None, None, query.shape[2], key.shape[2])  # of the sequences, all of which have the same
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)
        gradients = ops._scaled_dot_product_flash_attention_backward(
            *tensors, *lengths, 0.0, is_causal, *no_dropout, scale=scale
        )
    grad_query, grad_key, grad_value = gradients
    return grad_query, grad_key, grad_value
