"""Layers whose arguments nobody can guess from their names: images with height and width, needed defaults, objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.cases import LENGTH, VOCABULARY, Case, next_token_loss

WIDTH, HEADS = 16, 4
HEAD = WIDTH // HEADS
SIDE, WINDOW = 4, 2
"""Of hidden states `[batch, SIDE, SIDE, WIDTH]`, and of the windows in which they attend."""
STEPS_OF_NOISE = 10


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class WindowAttention(nn.Module):
    """As in torchvision's Swin: attention inside of windows, with a learned bias for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, WINDOW**2, WINDOW**2))

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        x = x.view(batch, height // WINDOW, WINDOW, width // WINDOW, WINDOW, channels)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, WINDOW**2, channels)
        q, k, v = self.qkv(x).reshape(x.shape[0], WINDOW**2, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        shares = (q @ k.transpose(-2, -1) * HEAD**-0.5 + self.bias).softmax(-1)
        x = self.proj((shares @ v).transpose(1, 2).reshape(x.shape[0], WINDOW**2, channels))
        x = x.view(batch, height // WINDOW, width // WINDOW, WINDOW, WINDOW, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)


class SwinBlock(nn.Module):
    """Hidden states have a height and a width, and are shifted in every second layer."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = WindowAttention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        x = x + torch.roll(self.attention(y), (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x).view(batch, height * width, channels)).view(x.shape)


class Swin(Case):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(SwinBlock(shift) for shift in (0, 1, 0))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens).view(-1, SIDE, SIDE, WIDTH)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 2), tokens.flatten())


class RelativeAttention(nn.Module):
    """As in DeBERTa: positions have embeddings of their own, which the maps of keys and queries also read."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> Tensor:
        query_states = hidden if query_states is None else query_states
        q, k, v = (
            m(y).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for m, y in ((self.query, query_states), (self.key, hidden), (self.value, hidden))
        )
        places = self.key(F.dropout(rel_embeddings, 0.0)).unflatten(-1, (-1, HEAD)).transpose(0, 1)
        scores = q @ k.transpose(-2, -1)
        index = (relative_pos + LENGTH).clamp(0, 2 * LENGTH - 1).expand_as(scores)
        scores = scores + torch.gather(q @ places.transpose(-2, -1), -1, index)
        shares = (scores * HEAD**-0.5).masked_fill(~mask.bool(), -1e9).softmax(-1)
        return self.out((shares @ v).transpose(1, 2).flatten(2))


class DebertaLayer(nn.Module):
    """Needs two of the arguments that may be ``None``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = RelativeAttention(), Mlp()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self,
        hidden: Tensor,
        mask: Tensor,
        query_states: Tensor | None = None,
        relative_pos: Tensor | None = None,
        rel_embeddings: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        x = self.norm1(hidden + self.attention(hidden, mask, query_states, relative_pos, rel_embeddings))
        return self.norm2(x + self.mlp(x)), None


class Deberta(Case):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(2 * LENGTH, WIDTH)
        self.layer = nn.ModuleList(DebertaLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x, length = self.tokens(tokens), tokens.shape[1]
        positions = torch.arange(length)
        relative = (positions[:, None] - positions)[None, None]
        mask = (positions < 11 + tokens[:, :1] % 5)[:, None, None]
        for layer in self.layer:
            x, _ = layer(x, mask, relative_pos=relative, rel_embeddings=self.places.weight)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class AdaLayerNormZero(nn.Module):
    """As in diffusers: shift, scale and gate from numbers of steps and classes, which each layer embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.classes = nn.Embedding(STEPS_OF_NOISE, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.linear, self.norm = nn.Linear(WIDTH, 6 * WIDTH), nn.LayerNorm(WIDTH, elementwise_affine=False)

    def forward(self, x: Tensor, timestep: Tensor | None, class_labels: Tensor | None) -> tuple[Tensor, ...]:
        given = self.linear(F.silu(self.steps(timestep) + self.classes(class_labels)))[:, None]
        shift, scale, *rest = given.chunk(6, -1)
        return self.norm(x) * (1 + scale) + shift, *rest


class DiTBlock(nn.Module):
    """Arguments that it must have are ``None`` by default, and one that is ``None`` has a branch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = AdaLayerNormZero(), nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.q2, self.out2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = Mlp()

    def forward(
        self,
        x: Tensor,
        encoder_hidden_states: Tensor | None = None,
        timestep: Tensor | None = None,
        class_labels: Tensor | None = None,
    ) -> Tensor:
        y, gate1, shift, scale, gate2 = self.norm1(x, timestep, class_labels)
        q, k, v = (m(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + gate1 * self.out(y)
        if encoder_hidden_states is not None:
            x = x + self.out2(F.silu(self.q2(x)) * encoder_hidden_states)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale) + shift)


class DiT(Case):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer_blocks = nn.ModuleList(DiTBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for block in self.transformer_blocks:
            for unused in (block.q2, block.out2):
                unused.requires_grad_(False)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.transformer_blocks:
            x = block(x, timestep=tokens[:, 1] % STEPS_OF_NOISE, class_labels=tokens[:, 0])
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class WithSettings(nn.Module):
    """Takes an object of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor, settings: Any) -> Tensor:
        return x + self.mlp(x * settings.scale)


class Settings(Case):
    """Draws random numbers, counts its steps, changes its batch and a buffer: a step that runs twice would show."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(WithSettings() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.num_steps = 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def loss(self, tokens: Tensor) -> Tensor:
        self.num_steps += 1
        tokens.add_(1).remainder_(VOCABULARY)
        x = self.tokens(tokens) * self.num_steps + 0.1 * torch.randn(tokens.shape[1], 1)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        for block in self.blocks:
            x = block(x + self.mean, SimpleNamespace(scale=1.5))
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Transposing(nn.Linear):
    """As in transformers' Falcon: a linear map with a forward of its own that computes the same."""

    def forward(self, input: Tensor) -> Tensor:
        states = input @ self.weight.T
        return states if self.bias is None else states + self.bias


class FalconLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (Transposing(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.dense, self.up, self.down = Transposing(WIDTH, WIDTH), Transposing(WIDTH, 32), Transposing(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (m(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for m in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.dense(attended) + self.down(F.gelu(self.up(y)))


class Falcon(Case):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.h = nn.ModuleList(FalconLayer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.h:
            x = layer(x)
        return next_token_loss(self.head(x), tokens)


RECORDED_MODULES: dict[str, type[Case]] = {"swin": Swin, "deberta": Deberta, "dit": DiT}
"""Name -> a module whose layers' arguments are taken from the first batch, and which draws no random numbers."""
