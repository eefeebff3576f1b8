"""Context parallel where it is easy to get wrong: what passes beside hidden states, lengths, and how layers compute."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from tests.models.cases import VOCABULARY, Case
from tests.parity import TOLERANCE, Outcome, Recorder, make_trainer, worst
from tests.techniques.context.test_sequences import Llama, batches

WIDTH = 16
KINDS = ("ulysses", "ring")


class Attention(nn.Module):
    """Attention of two heads, with `change` applied to queries, keys and values."""

    def __init__(self, *, is_causal: bool = True, change: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.is_causal = is_causal
        self.change = change

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        q, k, v = (
            m(y).unflatten(2, (2, 8)).transpose(1, 2) for m, y in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        if self.change is not None:
            q, k, v = self.change(q, k, v)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(**options)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Net(Case):
    """Three layers; batches have the lengths `lengths`, the last of which stays."""

    lengths: Sequence[int] = (16,)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def layer(self) -> nn.Module:
        return Layer()

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.lengths[min(self.global_step, len(self.lengths) - 1)]]
        return F.cross_entropy(self.head(self.run(self.hidden(tokens))).flatten(0, 1), tokens.flatten())


class Conditioned(Net):
    """Layers are given a mean over what another stack computes: whole on each rank, and used for a part by each."""

    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, condition: Tensor) -> Tensor:
            return super().forward(x + torch.sigmoid(self.gate(condition))[:, None] * x)

    lengths = (12,)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.encoder = nn.ModuleList(Layer(is_causal=False) for _ in range(2))

    def layer(self) -> nn.Module:
        return self.Layer()

    def run(self, x: Tensor) -> Tensor:
        encoded = x
        for layer in self.encoder:
            encoded = layer(encoded)
        condition = 3 * encoded.mean(1)
        for layer in self.layers:
            x = layer(x, condition)
        return x


class Slots(Net):
    """Four learned keys, whole on every rank; the part of a sequence of 7 would be as long."""

    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.slots, self.look_up = nn.Parameter(torch.randn(1, 4, WIDTH)), Attention(is_causal=False)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + self.look_up(x, self.slots.expand(len(x), -1, -1))

    lengths = (16, 7)

    def layer(self) -> nn.Module:
        return self.Layer()


class Lengths(Net):
    lengths = (16, 2, 1, 3, 5)


class OneTokenEach(Llama):
    """Hugging Face's layers take a single query for a step of generation, without a causal mask."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens[:, : 16 if self.global_step == 0 else 2])


class AsLongAsAHead(Llama):
    """A rotary table of as many positions as a head has dimensions."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens[:, : 16 if self.global_step == 0 else 8])


class Checkpointed(Net):
    """Layers that compute their attention again in backward, by themselves."""

    class Layer(Layer):
        use_reentrant = True

        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # where no input needs a gradient
                again = checkpoint(lambda y: self.attention(self.norm1(y)), x, use_reentrant=self.use_reentrant)
            return x + again + self.mlp(self.norm2(x + again))

    def layer(self) -> nn.Module:
        return self.Layer()


class CheckpointedByHooks(Checkpointed):
    class Layer(Checkpointed.Layer):
        use_reentrant = False


class Skips(Net):
    """The last layer is given what the first one returned."""

    class Layer(Layer):
        def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:
            x = super().forward(x)
            return x if skipped is None else x + skipped

    def layer(self) -> nn.Module:
        return self.Layer()

    def run(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first), first)


def strided(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q.transpose(2, 3).contiguous().transpose(2, 3), k, v


def one_for_all(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q, k[:1], v[:1]


def with_table_in_fp32(q: Tensor, k: Tensor, v: Tensor) -> Any:
    table = torch.linspace(0.5, 1, 8)
    return q * table, k * table, v


def changed(change: Callable[..., Any]) -> type[Net]:
    class Changed(Net):
        def layer(self) -> nn.Module:
            return Layer(change=change)

    return Changed


class NotANumber(Net):
    """A batch that is to be skipped, before there was another."""

    def hidden(self, tokens: Tensor) -> Tensor:
        hidden = super().hidden(tokens)
        return (
            hidden + torch.full_like(hidden[:1], torch.nan) if self.global_step == 0 and not self.training else hidden
        )


RUN: dict[str, type[Case]] = {
    "conditioned": Conditioned,
    "slots": Slots,
    "lengths": Lengths,
    "one_token_each": OneTokenEach,
    "as_long_as_a_head": AsLongAsAHead,
    "checkpointed": Checkpointed,
    "checkpointed_by_hooks": CheckpointedByHooks,
    "skips": Skips,
    "strided": changed(strided),
    "one_for_all": changed(one_for_all),
}


class SecondMixes(Net):
    """Not the first layer, but the second one mixes positions outside of attention."""

    class Layer(Layer):
        mixes = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x + x.cumsum(1) / 10 if self.mixes else x

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers[1].mixes = True

    def layer(self) -> nn.Module:
        return self.Layer()


class WithBatchNorm(Net):
    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.batch_norm(super().forward(x).transpose(1, 2)).transpose(1, 2)

    def layer(self) -> nn.Module:
        return self.Layer()


class Balanced(Net):
    """Layers return a loss of their own, of means over positions."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Any:
            x = super().forward(x)
            return x, x.softmax(-1).mean((0, 1)).square().sum()

    def layer(self) -> nn.Module:
        return self.Layer()

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x, extra = layer(x)
            x = x + 0 * extra
        return x


class LeavesEarly(Net):
    """The last of five steps does without the last layer: no later one could notice."""

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 2 if self.global_step == 4 else 3]:
            x = layer(x)
        return x.mean(1, keepdim=True).expand(-1, 16, -1)


class LeavesEarlyInEvaluation(LeavesEarly):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x.mean(1, keepdim=True).expand(-1, 16, -1)


class FailsOnce(Net):
    """An error between two layers, after which the same module is trained again."""

    has_failed = False

    def run(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        if not self.has_failed:
            self.has_failed = True
            raise MemoryError("in the middle")
        return self.layers[2](x)


def fewer_queries(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return q[:, :1], k, v


class OtherLength(Net):
    """Cross-attention to a sequence whose length is divisible, but which is padded beside the other one."""

    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.cross = Attention(is_causal=False)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            return self.cross(super().forward(x), memory)

    lengths = (16, 13)

    def layer(self) -> nn.Module:
        return self.Layer()

    def loss(self, tokens: Tensor) -> Tensor:
        self.memory = self.hidden(tokens)
        return super().loss(tokens)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.memory)
        return x


REFUSED: dict[tuple[str, str], tuple[type[Case], str]] = {
    ("second_mixes", "both"): (SecondMixes, "changes what layers.1 (Layer) computes"),
    ("batch_norm", "both"): (WithBatchNorm, "layers.0.batch_norm takes statistics of all positions"),
    ("balanced", "both"): (Balanced, "layers.0 (Layer) returns a tensor () beside hidden states"),
    ("leaves_early", "both"): (LeavesEarly, "by layers.0 and left it before the last layer"),
    ("fewer_queries", "ring"): (changed(fewer_queries), "the 2 heads of keys divide, but queries have 1"),
    ("other_length", "ring"): (OtherLength, "in all of a step, but got another beside 16"),
}


def train(module: type[Case], strategy: str, num_ranks: int, **kwargs: Any) -> Outcome:
    L.seed_everything(3, verbose=False)
    recorder = Recorder()
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, callbacks=[recorder], gradient_clip_val=0.5, **kwargs)
    trainer.fit(module(), batches("byte_gpt", 1))
    recorder.outcome.final = full_state_dict(trainer)
    return recorder.outcome


def trained(name: str, strategy: str, num_ranks: int) -> Outcome:
    return train(RUN[name], strategy, num_ranks)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RUN)
def test_equal_to_one_process(ranks: Any, name: str, kind: str) -> None:
    expected = trained(name, "auto", 1)
    assert worst(ranks(2).run(trained, name, f"cp_custom:context_attention={kind}", 2)[0], expected) < TOLERANCE


def refusal(name: str, kind: str, attention: str) -> str:
    try:
        train(REFUSED[name, kind][0], f"cp_custom:context_attention={attention}", 2)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize(("name", "kind"), REFUSED)
def test_what_parts_would_compute_differently_is_refused(ranks: Any, name: str, kind: str, attention: str) -> None:
    if kind not in ("both", attention):
        pytest.skip("it runs, or is refused for another reason")
    assert REFUSED[name, kind][1] in ranks(2).run(refusal, name, kind, attention)[0]


def early_evaluation() -> str:
    try:
        trainer = make_trainer(build_strategy("cp_custom"), 2)
        trainer.validate(LeavesEarlyInEvaluation(), batches("byte_gpt", 1), verbose=False)
    except ConfigurationError as error:
        return str(error)
    return ""


def test_an_evaluation_that_leaves_early_is_refused(ranks: Any) -> None:
    assert "left it before the last layer" in ranks(2).run(early_evaluation)[0]


def fit_after_an_error(strategy: str) -> float:
    module = FailsOnce()
    with pytest.raises(MemoryError):
        make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1))
    trainer = make_trainer(build_strategy(strategy), 2)
    trainer.validate(module, batches("byte_gpt", 1), verbose=False)
    trainer.fit(module, batches("byte_gpt", 1))
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.parametrize("strategy", ["cp_custom", "tp_custom:sequence=true", "fsdp_custom:recompute=full"])
def test_a_step_that_failed_in_the_middle_is_forgotten(ranks: Any, strategy: str) -> None:
    """The module is still sharded then, and is trained on as it is."""
    losses = ranks(2).run(fit_after_an_error, strategy)
    assert min(losses) > 0


def in_bf16(strategy: str, num_ranks: int) -> Outcome:
    return train(changed(with_table_in_fp32), strategy, num_ranks, precision="bf16-mixed")


@pytest.mark.parametrize("kind", KINDS)
def test_attention_of_several_dtypes_under_autocast(ranks: Any, kind: str) -> None:
    """Attention casts under autocast, so a table in fp32 is no error there."""
    expected = in_bf16("auto", 1)
    ours = ranks(2).run(in_bf16, f"cp_custom:context_attention={kind}", 2)[0]
    assert ours.losses == pytest.approx(expected.losses, rel=2e-2)


def sanity(strategy: str, num_ranks: int) -> float:
    trainer = make_trainer(build_strategy(strategy), num_ranks)
    trainer.validate(NotANumber(), batches("byte_gpt", 1), verbose=False)
    return float(trainer.callback_metrics["val_loss"])


def test_a_batch_that_is_not_a_number_is_no_difference(ranks: Any) -> None:
    assert all(value != value for value in ranks(2).run(sanity, "cp_custom", 2))


def refused_twice() -> list[str]:
    module, found = SecondMixes(), []
    for strategy in ("cp_custom", "cp_custom:recompute=full"):
        with pytest.raises(ConfigurationError) as caught:
            make_trainer(build_strategy(strategy), 2).fit(module, batches("byte_gpt", 1))
        found.append(str(caught.value))
    return found


def test_a_module_left_cut_says_so(ranks: Any) -> None:
    first, second = ranks(2).run(refused_twice)[0]
    assert "changes what layers.1" in first
    assert "still sharded by an earlier fit" in second
