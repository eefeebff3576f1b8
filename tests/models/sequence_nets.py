"""Layers that take more than hidden states, and networks that treat sequences in unusual ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.cases import VOCABULARY, Case
from tests.models.hugging_face import Llama

WIDTH = 16


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


RUN: dict[str, type[Case]] = {
    "conditioned": Conditioned,
    "slots": Slots,
    "other_length": OtherLength,
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


class AddsBetween(Net):
    """Positions are added again behind each layer, as many as there are in the whole sequence."""

    def run(self, x: Tensor) -> Tensor:
        positions = self.positions.weight[: x.shape[1]]
        for layer in self.layers:
            x = layer(x) + positions
        return x


class SumsLayers(Net):
    """The results of all layers are added up, of which only the last is of the whole sequence."""

    def run(self, x: Tensor) -> Tensor:
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        return torch.stack(results).sum(0)


class LossBehindEach(Net):
    """A loss behind each layer, with labels of the whole sequence."""

    def run(self, x: Tensor) -> Tensor:
        labels = torch.zeros(x.shape[:2], dtype=torch.long)
        for layer in self.layers:
            x = layer(x)
            x = x + 1e-3 * F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return x


REFUSED: dict[tuple[str, str], tuple[type[Case], str]] = {
    ("second_mixes", "both"): (SecondMixes, "changes what layers.1 (Layer) computes"),
    ("batch_norm", "both"): (WithBatchNorm, "layers.0.batch_norm takes statistics of all positions"),
    ("balanced", "both"): (Balanced, "layers.0 (Layer) returns a tensor () beside hidden states"),
    ("adds_between", "both"): (
        AddsBetween,
        "code behind layers.0, where each rank has a part of the sequence (8 of 16",
    ),
    ("loss_behind_each", "both"): (LossBehindEach, "(8 of 16 positions), fails with: Expected input batch_size"),
    ("sums_layers", "both"): (SumsLayers, "which the step or a hook has kept, are parts (8 of 16 positions)"),
    ("leaves_early", "both"): (LeavesEarly, "by layers.0 and left it before the last layer"),
    ("fewer_queries", "ring"): (changed(fewer_queries), "the 2 heads of keys divide, but queries have 1"),
}
