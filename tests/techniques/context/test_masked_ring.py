"""Ring attention under masks: equal to attention over whole sequences, also where a block or a row is masked out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_parallel.techniques.context import ring
from lightning_parallel.techniques.context.sequences import Sequences
from tests.data import batches
from tests.models.hugging_face import Llama
from tests.parity import BF16, Outcome, assert_same_training, checked, largest, once, train_module

BATCH, HEADS = 3, 4


def padding(queries: int, keys: int) -> Tensor:
    """One sample without padding, one that ends early, so that whole blocks are masked out, and one of nothing else."""
    return (torch.arange(keys) < torch.tensor([[keys], [2], [0]]))[:, None, None]


def causal(queries: int, keys: int) -> Tensor:
    return torch.ones(queries, keys, dtype=torch.bool).tril()


def padded_on_the_left(queries: int, keys: int) -> Tensor:
    """Causal, too: the first queries see nothing."""
    return causal(queries, keys) & (torch.arange(keys) >= torch.tensor([[0], [3], [keys - 1]]))[:, None, None]


def added(mask: Callable[[int, int], Tensor], masked: float) -> Callable[[int, int], Tensor]:
    return lambda queries, keys: torch.zeros(()).masked_fill(~mask(queries, keys), masked)


def learned(*sizes: int) -> Callable[[int, int], Tensor]:
    """A bias with a gradient; 0 stands for the lengths."""

    def bias(queries: int, keys: int) -> Tensor:
        shape = [size or length for size, length in zip(sizes, (0, 0, queries, keys), strict=True)]
        return torch.randn(shape).requires_grad_()

    return bias


MASKS: dict[str, Callable[[int, int], Tensor]] = {
    "padding": padding,
    "padding per query": lambda queries, keys: padding(queries, keys).expand(-1, -1, queries, -1),
    "causal": causal,
    "causal, padded on the left": padded_on_the_left,
    "added": added(padded_on_the_left, float("-inf")),
    # As transformers pass it: rows without any key attend to all of them alike.
    "added smallest numbers": added(padded_on_the_left, torch.finfo(torch.float32).min),
    "of heads": lambda queries, keys: torch.rand(1, HEADS, queries, keys) < 0.5,
    "for all keys": lambda queries, keys: torch.rand(BATCH, 1, queries, 1) < 0.5,
    "learned": learned(1, HEADS, 0, 0),
    "learned for keys": learned(BATCH, 1, 1, 0),
    "none": lambda queries, keys: torch.ones(1, 1, dtype=torch.bool),
}


def errors_under(kind: str, dtype: torch.dtype, in_parts: bool) -> dict[str, float]:
    """The largest difference to attention in one process and fp64, of outputs and all gradients."""
    group = dist.group.WORLD
    assert group is not None
    pieces, found = 2 * group.size(), {}
    for kv_heads, queries, keys in ((4, 3 * pieces, 3 * pieces), (2, 3 * pieces - 3, 2 * pieces - 1)):
        torch.manual_seed(0)
        shapes = ((BATCH, HEADS, queries, 8), (BATCH, kv_heads, keys, 8), (BATCH, kv_heads, keys, 6))
        given = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        mask = MASKS[kind](queries, keys)
        mask = mask if mask.dtype == torch.bool else mask.detach().to(dtype).requires_grad_(mask.requires_grad)
        given += [mask] if mask.requires_grad else []
        wide = [each.detach().double().requires_grad_() for each in given]
        is_float = mask.dtype != torch.bool
        whole_mask = wide[3] if mask.requires_grad else mask.double() if is_float else mask
        expected = F.scaled_dot_product_attention(*wide[:3], whole_mask, enable_gqa=True)
        weights = torch.randn_like(expected)
        gradients = torch.autograd.grad((expected * weights).sum(), wide)
        sequences = Sequences(group, folds=True)
        parts = [sequences.cut(each, 2) for each in given[:3]]
        if in_parts and mask.shape[-1] == keys:  # as a padding mask among a layer's arguments is
            mask = sequences.cut(mask, mask.ndim - 1) if mask.shape[-2] == 1 else mask
        elif mask.requires_grad:
            mask = sequences.share(mask)
        output = sequences.join(ring.attend(sequences, *parts, mask), 2)
        ours = [g.contiguous() for g in torch.autograd.grad((output * weights.to(dtype)).sum(), given)]
        for index, gradient in enumerate(ours):
            if index < 3 or in_parts:  # each rank has that of its part
                dist.all_reduce(gradient)
                gradient /= group.size()
        pairs = [(output, expected), *zip(ours, gradients, strict=True)]
        name = f"kv_heads={kv_heads} queries={queries} keys={keys}"
        found[name] = largest((a - b).detach().abs().max() for a, b in pairs)
    return found


def errors_by_kind(kinds: list[str], dtype: torch.dtype, in_parts: bool) -> dict[str, float]:
    return {f"{kind} {name}": e for kind in kinds for name, e in errors_under(kind, dtype, in_parts).items()}


@pytest.mark.parametrize(
    ("size", "kinds", "dtype", "tolerance"),
    [
        (2, [*MASKS], torch.float64, 1e-13),
        (2, [*MASKS], torch.float32, 5e-6),
        (4, ["causal, padded on the left", "added smallest numbers", "learned"], torch.float64, 1e-13),
    ],
)
def test_equal_to_whole_attention(
    ranks: Any, size: int, kinds: list[str], dtype: torch.dtype, tolerance: float
) -> None:
    for found in ranks(size).run(errors_by_kind, kinds, dtype, False):
        assert {name: error for name, error in found.items() if not error <= tolerance} == {}


def test_masks_that_were_cut_with_the_keys(ranks: Any) -> None:
    for found in ranks(2).run(errors_by_kind, ["padding", "learned for keys"], torch.float64, True):
        assert {name: error for name, error in found.items() if not error <= 1e-13} == {}


class PaddedLlama(Llama):
    """Causal, and padded on the left, by up to three quarters: a rank's first piece may be padding alone."""

    def loss(self, tokens: Tensor) -> Tensor:
        is_there = torch.arange(tokens.shape[1]) >= tokens[:, :1] % 13
        return self.model(input_ids=tokens, attention_mask=is_there.long(), labels=tokens.where(is_there, -100)).loss


def padded_llama(strategy: str, num_ranks: int, readers: int, **kwargs: Any) -> Outcome:
    return train_module(PaddedLlama, batches("byte_gpt", readers), strategy, num_ranks, norms=True, **kwargs)


@pytest.mark.parametrize(
    ("strategy", "size", "readers"),
    [
        (checked("cp_custom:context_attention=ring"), 2, 1),
        ("fsdp_custom:context=4,context_attention=ring,recompute=full", 4, 1),
        ("fsdp_custom:context=2,tensor=2,context_attention=ring", 4, 1),
        ("cp_custom:context_attention=ring,compile=layers", 2, 1),
    ],
)
def test_causal_and_padded(ranks: Any, strategy: str, size: int, readers: int) -> None:
    expected = once(padded_llama, "auto", 1, 1)
    assert_same_training(ranks(size).run(padded_llama, strategy, size, readers)[0], expected)


def test_mixed_precision(ranks: Any) -> None:
    expected = once(padded_llama, "auto", 1, 1, precision="bf16-mixed")
    ours = ranks(2).run(padded_llama, "cp_custom:context_attention=ring", 2, 1, precision="bf16-mixed")[0]
    assert ours.losses == pytest.approx(expected.losses, rel=BF16)
