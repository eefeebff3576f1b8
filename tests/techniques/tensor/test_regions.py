"""Hidden states, embeddings, heads and the loss over ranks that share matrix products: one process's numbers."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel import build_strategy, full_state_dict
from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.techniques.tensor.plan import plan_tensor
from tests.collectives import Collectives
from tests.data import batches
from tests.models.cases import CASES, VOCABULARY, ByteGPT, Case
from tests.models.tables import CONTEXT_MODULES
from tests.parity import TOLERANCE, difference, is_moving, make_trainer, reference, train, worst

SPLIT_TABLES = {
    "llama": "{lm_head: vocab, embed_tokens: vocab}",
    "hf_gpt2": "{wte: vocab}",
    "byte_gpt": "{tokens: vocab, head: vocab}",
    "varying_length": "{head: vocab}",
    "bare_parameter": "{tokens: vocab, head: vocab}",
    "configure_model": "{tokens: vocab}",
    "encoder": "{tokens: vocab, head: vocab}",
}


@pytest.mark.parametrize("case", CONTEXT_MODULES)
def test_sequences_between_branches(ranks: Any, case: str) -> None:
    expected = reference(case)
    assert is_moving(expected)
    assert worst(ranks(2).run(train, case, "adamw", "tp_custom:sequence=true", 2, 1)[0], expected) < TOLERANCE


@pytest.mark.parametrize(
    ("strategy", "readers"),
    [
        ("tp_custom:sequence=true", 1),
        ("fsdp_tp_custom:sequence=true", 2),
        ("hsdp_custom:replicate=2,tensor=2,sequence=true,recompute=full", 2),
    ],
)
@pytest.mark.parametrize("case", ["odd_length", "bert", "two_lengths"])
def test_products_with_split_sequences(ranks: Any, case: str, strategy: str, readers: int) -> None:
    expected = reference(case)
    assert worst(ranks(4).run(train, case, "adamw", strategy, 4, readers)[0], expected) < TOLERANCE


@pytest.mark.parametrize("case", SPLIT_TABLES)
@pytest.mark.parametrize(("strategy", "size", "readers"), [("tp_custom", 2, 1), ("fsdp_tp_custom", 4, 2)])
def test_tables_are_split_by_tokens(ranks: Any, case: str, strategy: str, size: int, readers: int) -> None:
    expected = reference(case)
    name = f"{strategy}:tensor_plan={SPLIT_TABLES[case]}"
    assert worst(ranks(size).run(train, case, "adamw", name, size, readers)[0], expected) < TOLERANCE


class Separate(nn.Module):
    """Queries, keys and values of their own; heads by ``-1``."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SeparateBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.attention = Separate()
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SeparateGPT(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(SeparateBlock() for _ in range(3))


def collectives(strategy: str) -> dict[str, list[int]]:
    """What the second step sends, forward and backward, by kind; sums over dtypes."""
    forward, backward = Collectives(), Collectives()

    class Module(SeparateGPT):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx != 1:
                return super().training_step(batch, batch_idx)
            with forward:
                return self.loss(*batch)

        def on_before_backward(self, loss: Tensor) -> None:
            if self.trainer.global_step == 1:
                backward.__enter__()

        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                backward.__exit__(None, None, None)

    make_trainer(build_strategy(strategy), 2).fit(Module(), batches("byte_gpt", 1, 3))
    found: dict[str, list[int]] = {}
    for index, mode in enumerate((forward, backward)):
        for (kind, dtype), number in mode.counts.items():
            if dtype.is_floating_point:
                found.setdefault(kind, [0, 0])[index] += number
    return found


def test_two_all_reduces_a_layer(ranks: Any) -> None:
    found = ranks(2).run(collectives, "tp_custom")[0]
    assert found["all_reduce"] == [2 * 3, 2 * 3]


def test_split_sequences_send_the_same_in_halves(ranks: Any) -> None:
    whole, parts = (ranks(2).run(collectives, f"tp_custom{option}")[0] for option in ("", ":sequence=true"))

    def more(kind: str) -> list[int]:
        return [a - b for a, b in zip(parts.get(kind, [0, 0]), whole.get(kind, [0, 0]), strict=True)]

    assert more("gather") == [
        2 * 3 + 1,
        2 * 3 + 1,
    ]  # a branch each, and the exit; backward: a branch each, and the entry
    assert more("reduce_scatter") == [2 * 3, 2 * 3]
    assert parts["all_reduce"] == [0, 3]  # of a layer's parameters that every rank has whole


def test_the_loss_of_split_logits_gathers_none(ranks: Any) -> None:
    found = ranks(2).run(collectives, "tp_custom:tensor_plan={head: vocab}")[0]
    whole = ranks(2).run(collectives, "tp_custom")[0]
    assert found.get("gather") == whole.get("gather")
    assert found["all_reduce"] == [2 * 3 + 2, 2 * 3 + 1]  # the largest and the sums; the gradient of hidden states


class Scores(Case):
    """Embedding with padding, and every kind of loss over logits that have the classes second."""

    def __init__(self, optimizer: str = "adamw", **options: Any) -> None:
        super().__init__(optimizer)
        self.options = options
        self.tokens = nn.Embedding(VOCABULARY, 16, padding_idx=3)
        self.layers = nn.ModuleList(SeparateBlock() for _ in range(2))
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        target = tokens.masked_fill(tokens == 5, -100).roll(-1, 1)
        losses = F.cross_entropy(logits.transpose(1, 2), target, **self.options)
        return losses.sum() / 100 if losses.ndim else losses / (100 if self.options.get("reduction") == "sum" else 1)


def scores(strategy: str, num_ranks: int, options: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    L.seed_everything(3, verbose=False)
    weight = {"weight": torch.linspace(0.5, 1.5, VOCABULARY)} if options.pop("is_weighted", False) else {}
    module = Scores(**options, **weight)
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, gradient_clip_val=0.5)
    trainer.fit(module, batches("byte_gpt", 1))
    predicted = torch.stack(trainer.predict(module, batches("byte_gpt", 1)))
    return full_state_dict(trainer), predicted


@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"is_weighted": True}],
    ids=str,
)
def test_every_loss_over_split_logits(ranks: Any, options: dict[str, Any]) -> None:
    name = "tp_custom:tensor_plan={tokens: vocab, head: vocab}"
    (ours, ours_predicted), *_ = ranks(2).run(scores, name, 2, dict(options))
    theirs, theirs_predicted = scores("auto", 1, dict(options))
    assert difference(ours, theirs) < TOLERANCE
    assert float((ours_predicted - theirs_predicted).abs().max()) < TOLERANCE


@pytest.mark.parametrize(
    ("plan", "degree", "words"),
    [
        ({"nothing": "vocab"}, 2, ["'nothing' names no embedding or head", "model.tokens", "model.head"]),
        ({"head": "vocab"}, 3, ["tensor=3 does not divide the 32 tokens of model.head", "1, 2, 4"]),
        ({"blocks.*.mlp.0": "vocab"}, 2, ["names no embedding or head"]),
    ],
)
def test_tables_that_cannot_be_split(plan: dict[str, str], degree: int, words: list[str]) -> None:
    module = CASES["byte_gpt"]()
    violations = "\n".join(plan_tensor(module, find_layers(module), plan, degree=degree).violations)
    assert [word for word in words if word not in violations] == [], violations


def test_tied_tables_are_split_together() -> None:
    module = CASES["hf_gpt2"]()
    plan = plan_tensor(module, find_layers(module), {"lm_head": "vocab"}, degree=2)
    assert plan.violations == []
    assert set(plan.tables) == {"model.lm_head", "model.transformer.wte"}
