"""A decoder of any size, and the module that trains it, as a user writes them."""

from __future__ import annotations

from dataclasses import dataclass

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import TensorDataset


@dataclass(frozen=True)
class Size:
    """The size of a model, and of what it is given.

    Args:
        width: Features of a position.
        depth: Layers.
        heads: Heads of a layer.
        length: Positions of a sequence.
        batch: Sequences of a rank.
        vocabulary: Tokens that there are.
    """

    width: int = 64
    depth: int = 4
    heads: int = 4
    length: int = 32
    batch: int = 2
    vocabulary: int = 256

    @property
    def flops(self) -> float:
        """Of a step of one rank: six a parameter and token, and the two products of causal attention."""
        tokens = self.batch * self.length
        maps = self.depth * 12 * self.width**2 + self.vocabulary * self.width
        return tokens * (6 * maps + 6 * self.depth * self.length * self.width)


BILLION = Size(width=2048, depth=20, heads=16, length=2048, batch=4, vocabulary=32_000)


class Layer(nn.Module):
    """Attention and two maps, after norms."""

    def __init__(self, size: Size, dropout: float, *, is_flash: bool) -> None:
        super().__init__()
        self.heads, self.is_flash = size.heads, is_flash
        self.attention_norm, self.mlp_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.query, self.key, self.value, self.output = (nn.Linear(size.width, size.width) for _ in range(4))
        self.mlp = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )
        self.dropout = nn.Dropout(dropout)

    def attend(self, x: Tensor) -> Tensor:
        """Hidden states `[batch, length, width]` to the same shape."""
        split = [each(x).unflatten(-1, (-1, x.shape[-1] // self.heads)) for each in (self.query, self.key, self.value)]
        heads = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in split), is_causal=True)
        return self.output(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states `[batch, length, width]` to the same shape."""
        if self.is_flash:
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                x = x + self.attend(self.attention_norm(x))
        else:
            x = x + self.attend(self.attention_norm(x))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class GPT(nn.Module):
    """A decoder without positions, for which the causal mask is enough."""

    def __init__(self, size: Size, dropout: float = 0.0, *, is_flash: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Layer(size, dropout, is_flash=is_flash) for _ in range(size.depth))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens `[batch, length]` to the mean loss (a scalar) of the next ones."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Module(L.LightningModule):
    """The module, built at once or, `deferred`, in `configure_model`.

    Args:
        size: Of the model.
        dropout: The share of features that are dropped.
        is_deferred: Whether it is built in `configure_model`.
        is_flash: Whether attention has to be computed by the flash kernel.
        optimizer: ``"adamw"``, ``"fused"`` or ``"sgd"``.
    """

    def __init__(
        self,
        size: Size,
        dropout: float = 0.0,
        *,
        is_deferred: bool = False,
        is_flash: bool = False,
        optimizer: str = "adamw",
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.size, self.dropout, self.is_flash = size, dropout, is_flash
        if not is_deferred:
            self.model = GPT(size, dropout, is_flash=is_flash)

    def configure_model(self) -> None:
        """Build it, if it is not there."""
        if not hasattr(self, "model"):
            self.model = GPT(self.size, self.dropout, is_flash=self.is_flash)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A batch of tokens `[batch, length]` to the loss."""
        return self.model(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW, fused or not, or SGD with momentum, on all parameters."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True if self.optimizer == "fused" else None)


def tokens(size: Size, count: int) -> TensorDataset:
    """`count` samples of random tokens `[length]`, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randint(0, size.vocabulary, (count, size.length), generator=generator))
