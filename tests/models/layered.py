"""Models with layers of torch's and of their own."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.models.cases import LENGTH, VOCABULARY, ByteGPT, Case, next_token_loss


class Encoder(Case):
    """torch's own layers; the sequence is the second dimension, or the first."""

    def __init__(self, optimizer: str = "adamw", batch_first: bool = True) -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.batch_first = batch_first
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens if self.batch_first else tokens.t()
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.encoder(self.tokens(tokens), mask=mask, is_causal=True)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class SequenceFirst(Encoder):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, batch_first=False)


class PaddedEncoder(Encoder):
    def loss(self, tokens: Tensor) -> Tensor:
        padding = torch.arange(LENGTH) >= 10 + tokens[:, :1] % 5
        hidden = self.encoder(self.tokens(tokens), src_key_padding_mask=padding)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


class Demo(Case):
    """Lightning's own demo: `nn.Transformer`, whose layers have the sequence first."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from lightning.pytorch.demos import Transformer

        self.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhead=4, nhid=32, nlayers=2, dropout=0.0)

    def loss(self, tokens: Tensor) -> Tensor:
        return F.nll_loss(self.model(tokens, tokens.roll(1, 1)), tokens.flatten())


class Recurrence(nn.Module):
    """A gated linear recurrence with a parameter for each feature, which keeps its last state, for a next call."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.decay = nn.Parameter(torch.linspace(-2, 2, 2 * width))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        inputs, decay = self.up(self.norm(x)), self.decay.sigmoid()
        states = [inputs[:, 0]]
        for position in range(1, x.shape[1]):
            states.append(decay * states[-1] + (1 - decay) * inputs[:, position])
        self.state = states[-1]
        return x + self.down(torch.stack(states, 1))


class Recurrences(ByteGPT):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(Recurrence() for _ in range(3))


class HardBlock(nn.Module):
    """Maps of their own for queries, keys and values, and the number of heads written into `forward`."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.asked_for = heads, heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            m(y).view(batch, length, self.asked_for, width // self.heads).transpose(1, 2)
            for m in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class DropoutBlock(HardBlock):
    """Dropout inside of a branch and on hidden states; ``-1`` heads, so that local tensors run through."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_for = -1
        self.up, self.down = nn.Sequential(self.up, nn.Dropout(0.3)), nn.Sequential(self.down, nn.Dropout(0.3))


class Hard(Case):
    def __init__(self, optimizer: str = "adamw", make: Any = HardBlock, depth: int = 3) -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.blocks = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(16, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return next_token_loss(self.head(x), tokens)


class Pruned(ByteGPT):
    """Maps whose weights hooks compute from parameters before each call, as an attribute that cannot be copied."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for block in self.model.blocks:
            prune.l1_unstructured(block.mlp[2], "weight", 0.3)


class Scaled(nn.Linear):
    """A linear map that is none: its result is doubled."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2
