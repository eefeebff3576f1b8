"""Dropout in ring attention: what is dropped, and that gradients know it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_parallel.techniques.context import ring
from lightning_parallel.techniques.context.sequences import Sequences
from tests.data import batches
from tests.models.cases import ByteGPT
from tests.parity import largest, train_module

BATCH, HEADS, PIECE, DIM = 2, 4, 6, 8
PROBABILITY = 0.25


def kept_and_errors(is_causal: bool, has_mask: bool, odd: int, kv_heads: int) -> tuple[Tensor, list[float]]:
    """What was dropped of this rank's rows, and errors of outputs and gradients of attention with just that dropped.

    Values that are unit vectors give the weights themselves; the same seed then drops the same ones of others.
    """
    group = dist.group.WORLD
    assert group is not None
    sequences, length = Sequences(group, folds=True), PIECE * group.size() - odd
    torch.manual_seed(0)
    shapes = ((BATCH, HEADS, length, DIM), *[(BATCH, kv_heads, length, DIM)] * 2)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    wave = torch.randn(shapes[0], dtype=torch.float64)
    is_there = torch.arange(length) < torch.tensor([length, 5])[:, None, None, None]
    mask = is_there if has_mask else None
    query, key, value = (sequences.cut(each, 2) for each in given)

    def attended(values: Tensor) -> Tensor:
        torch.manual_seed(7 + group.rank())
        return sequences.join(ring.attend(sequences, query, key, values, mask, PROBABILITY, is_causal), 2)

    units = torch.eye(length, dtype=torch.float64).expand(BATCH, kv_heads, -1, -1)
    dropped = attended(sequences.cut(units, 2)).detach()
    repeated = [each.repeat_interleave(HEADS // kv_heads, 1) for each in given[1:]]
    scores = given[0] @ repeated[0].transpose(-1, -2) * DIM**-0.5
    if is_causal:
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
    if has_mask:
        scores = scores.masked_fill(~is_there, float("-inf"))
    weights = scores.softmax(-1)
    seen = weights.detach() > 0
    factors = torch.where(seen, dropped / weights.detach(), 0.0)
    expected = (weights * factors.round(decimals=6)) @ repeated[1]
    output = attended(value)
    wanted = torch.autograd.grad((expected * wave).sum(), given)
    ours = [gradient.contiguous() for gradient in torch.autograd.grad((output * wave).sum(), given)]
    for gradient in ours:  # each rank has that of its part
        dist.all_reduce(gradient)
    pairs = [(output, expected), *((a / group.size(), b) for a, b in zip(ours, wanted, strict=True))]
    return factors[seen], [largest([(a - b).detach().abs().max()]) for a, b in pairs]


@pytest.mark.parametrize(
    ("is_causal", "has_mask", "odd", "kv_heads"), [(True, False, 0, 4), (False, True, 0, 2), (True, False, 1, 4)]
)
def test_gradients_are_those_of_what_was_kept(
    ranks: Any, is_causal: bool, has_mask: bool, odd: int, kv_heads: int
) -> None:
    """The factor of what is kept, 4/3, is rounded to six digits where it is read off."""
    for factors, errors in ranks(2).run(kept_and_errors, is_causal, has_mask, odd, kv_heads):
        assert largest(errors) < 1e-5
        is_kept = (factors - 1 / (1 - PROBABILITY)).abs() < 1e-6
        assert bool((is_kept | (factors == 0)).all())
        assert 0.6 < float(is_kept.double().mean()) < 0.9  # of some hundred weights


class WithDropout(ByteGPT):
    """A model whose layers draw, in attention and beside it."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        width = self.model.norm.weight.numel()
        layers = (nn.TransformerEncoderLayer(width, 2, 32, dropout=PROBABILITY, batch_first=True) for _ in range(2))
        self.model.blocks = nn.ModuleList(_Causal(layer) for layer in layers)


class _Causal(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, src_mask=mask, is_causal=True)


def losses(options: str) -> list[float]:
    return train_module(WithDropout, batches("byte_gpt", 1), f"cp_custom:context_attention=ring{options}", 2).losses


def test_a_module_with_dropout_trains_and_recomputes_the_same(ranks: Any) -> None:
    plain, recomputed = (ranks(2).run(losses, options)[0] for options in ("", ",recompute=full"))
    assert plain == pytest.approx(recomputed, abs=1e-6)
    assert plain == pytest.approx(ranks(2).run(losses, ",check=first_step")[0], abs=1e-6)
