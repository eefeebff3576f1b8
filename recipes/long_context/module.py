"""A byte-level GPT without a table of positions, so that a sequence may be of any length, in plain torch."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

NUM_BYTES = 256


def rotary_tables(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions (Su et al. 2021), each of shape (length, width / 2)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head by its position: (batch, length, heads, width of a head) -> the same shape."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """A pre-norm transformer layer: (batch, length, width) -> (batch, length, width).

    Args:
        width: Features of a position.
        num_heads: Divides `width` into heads of an even width.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.RMSNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @override
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Causal self-attention: (batch, length, width) -> (batch, length, width)."""
        batch, length, width = x.shape
        shape = (batch, length, self.num_heads, width // self.num_heads)
        query = rotate(self.query(x).view(shape), cos, sin).transpose(1, 2)
        key = rotate(self.key(x).view(shape), cos, sin).transpose(1, 2)
        value = self.value(x).view(shape).transpose(1, 2)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(heads.transpose(1, 2).reshape(batch, length, width))


class RotaryGPT(nn.Module):
    """Bytes, int64 of shape (batch, length) -> logits of the byte after each, (batch, length, 256).

    Args:
        width: Features of a position.
        num_layers: The number of blocks.
        num_heads: Divides `width` into heads of an even width.
    """

    def __init__(self, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens)
        cos, sin = rotary_tables(tokens.shape[1], self.head_width, tokens.device)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


class LongByteLM(LightningModule):
    """Predicts the next byte of a long text; logs `train_loss` in nats per byte and `val_bpb` in bits per byte.

    A batch is int64 of shape (batch, length), values 0 to 255, of any length.

    Args:
        width: Features of a position.
        num_layers: The number of transformer blocks.
        num_heads: Divides `width` into heads of an even width.
        learning_rate: Of AdamW, at its highest: it rises for the first tenth of all steps, then falls as a cosine.
    """

    def __init__(self, width: int = 128, num_layers: int = 2, num_heads: int = 8, learning_rate: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = RotaryGPT(width, num_layers, num_heads)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_bpb", self.loss(batch) / math.log(2), prog_bar=True, sync_dist=True)

    def loss(self, tokens: Tensor) -> Tensor:
        """The mean cross-entropy in nats per byte, over all bytes that have one before them in their sequence."""
        logits = self.model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer,
            max_lr=self.learning_rate,
            total_steps=int(self.trainer.estimated_stepping_batches),
            pct_start=0.1,
            cycle_momentum=False,
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
