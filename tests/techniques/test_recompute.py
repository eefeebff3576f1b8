"""Layers that are computed again in backward: what is kept, and what is written once."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_parallel import ConfigurationError, full_state_dict
from lightning_parallel.techniques.recompute import apply_recompute, parse_recompute, statistics_violations
from tests.data import loader
from tests.models.cases import GPT, LENGTH, VOCABULARY, Block, next_token_loss
from tests.models.hugging_face import CachingLlama
from tests.parity import TOLERANCE, difference, trainer_for


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once: those that a step made, and still held."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and id(storage := tensor.untyped_storage()) not in given:
                size = storage.nbytes()
                self.now += size
                weakref.finalize(storage, self._free, size)
        self.peak = max(self.peak, self.now)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def peak_of(recompute: str) -> tuple[int, list[Tensor]]:
    """Bytes at the peak of forward and backward, and the gradients, of a model with dropout."""
    torch.manual_seed(0)
    model = DeepGPT()
    apply_recompute(list(model.blocks), parse_recompute(recompute))
    tokens = torch.randint(0, VOCABULARY, (8, LENGTH))
    with LiveBytes() as mode:
        next_token_loss(model(tokens), tokens).backward()
    return mode.peak, [p.grad for p in model.parameters()]


class DeepGPT(GPT):
    def __init__(self) -> None:
        super().__init__(depth=6)
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.5))


def test_recompute_lowers_the_peak_and_replays_dropout() -> None:
    whole, gradients = peak_of("none")
    peaks = {rule: peak_of(rule) for rule in ("full", "every:2", "every:3", "selective")}
    assert peaks["full"][0] < peaks["every:2"][0] < peaks["every:3"][0] < whole
    assert peaks["full"][0] < peaks["selective"][0] < whole
    for _, others in peaks.values():
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))


def test_selective_keeps_attention_and_half_the_products() -> None:
    """Counted in backward: what was kept is not computed again."""
    torch.manual_seed(0)
    counts: dict[str, Counter[str]] = {}
    for rule in ("none", "full", "selective"):
        block = Block()
        apply_recompute([block], parse_recompute(rule))
        loss = block(torch.randn(2, 8, 16)).sum()
        with Operations() as mode:
            loss.backward()
        counts[rule] = mode.counts

    def again(rule: str, part: str) -> int:
        return sum(n - counts["none"][op] for op, n in counts[rule].items() if part in op)

    assert again("full", "mm") == 3  # nobody needs the result of the fourth product
    assert again("selective", "mm") == 1
    forward = "_scaled_dot_product_flash_attention_for_cpu.default"
    assert counts["full"][forward] == 1
    assert counts["selective"][forward] == 0


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func).removeprefix("aten.")] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", ["ddp_custom:recompute=full", "fsdp_custom:recompute=full", "zero2_custom:recompute=full"]
)
def test_recompute_with_a_cache_in_the_layers(ranks: Any, name: str) -> None:
    """Hugging Face's CachingLlama hands its layers a cache in training, to which a second forward would add again."""
    expected = fit_llama("auto", 1)
    assert difference(ranks(2).run(fit_llama, name, 2)[0], expected) < TOLERANCE


class ReadsItsCache(CachingLlama):
    """The second half of the sequence attends to the first through the cache."""

    def loss(self, tokens: Tensor) -> Tensor:
        first = self.model(input_ids=tokens[:, :8], labels=tokens[:, :8], use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"  # until transformers 5.24
        second = self.model(input_ids=tokens[:, 8:], labels=tokens[:, 8:], **{name: first[name]})
        return first.loss + second.loss


@pytest.mark.parametrize("option", ["recompute=full", pytest.param("compile=layers", marks=pytest.mark.slow)])
def test_a_cache_that_is_read_is_refused(option: str) -> None:
    trainer = trainer_for(f"dp_custom:{option}", 1)
    with pytest.raises(ConfigurationError, match="for the second time"):
        trainer.fit(ReadsItsCache(), loader(1))


def fit_llama(strategy: str, num_ranks: int) -> dict[str, Any]:
    L.seed_everything(3, verbose=False)
    trainer = trainer_for(strategy, num_ranks)
    trainer.fit(CachingLlama(), loader(num_ranks))
    return full_state_dict(trainer)


class NormBlock(nn.Module):
    """A layer with statistics and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # what forward sees depends on what it wrote
        return x + self.norm(self.linear(x)).relu() * self.calls


@pytest.mark.parametrize("recompute", ["full", "every:2", "selective"])
def test_recompute_writes_buffers_once(recompute: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(NormBlock() for _ in range(3)))
    ours = copy.deepcopy(plain)
    apply_recompute(list(ours), parse_recompute(recompute))
    for _ in range(3):
        x = torch.randn(8, 4)
        ours(x).pow(2).sum().backward()
        plain(x).pow(2).sum().backward()
    for (name, a), b in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), name
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_statistics_are_not_compiled_and_recomputed() -> None:
    layers = [NormBlock()]
    assert "BatchNorm1d" in statistics_violations(layers, "full", compiles=True)[0]
    assert statistics_violations(layers, "full", compiles=False) == []
    assert statistics_violations([layer.eval() for layer in layers], "full", compiles=True) == []
    assert statistics_violations([Block()], "selective", compiles=True) == []
