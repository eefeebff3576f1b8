"""A byte-level GPT in plain torch, trained with plain Lightning."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from typing_extensions import override

NUM_BYTES = 256


class Attention(nn.Module):
    """Causal self-attention: (batch, length, width) -> (batch, length, width).

    Args:
        width: Features of a position.
        num_heads: Divides `width`.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    @override
    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        shape = (batch, length, self.num_heads, width // self.num_heads)
        query = self.query(x).view(shape).transpose(1, 2)
        key = self.key(x).view(shape).transpose(1, 2)
        value = self.value(x).view(shape).transpose(1, 2)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(heads.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """A pre-norm transformer layer: (batch, length, width) -> (batch, length, width).

    Args:
        width: Features of a position.
        num_heads: Divides `width`.
    """

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Bytes, int64 of shape (batch, length) -> logits of the byte after each, (batch, length, 256).

    Args:
        context: The largest length, in bytes.
        width: Features of a position.
        num_layers: The number of blocks.
        num_heads: Divides `width`.
    """

    def __init__(self, context: int, width: int, num_layers: int, num_heads: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    @override
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ByteLM(LightningModule):
    """Predicts the next byte of a text; logs `train_loss` in nats per byte and `val_bpb` in bits per byte.

    A batch is int64 of shape (batch, length), values 0 to 255, with length at most `context`.

    Args:
        context: The largest length of a sequence, in bytes.
        width: Features of a position.
        num_layers: The number of transformer blocks.
        num_heads: Divides `width`.
        learning_rate: Of AdamW, at its highest: it rises linearly over the warm-up, then falls as a cosine to 0.
        weight_decay: Of AdamW, on all parameters.
        warmup: The share of all optimizer steps that the warm-up takes, 0 to 1.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 8,
        learning_rate: float = 4e-3,
        weight_decay: float = 0.1,
        warmup: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup = warmup
        self.model = GPT(context, width, num_layers, num_heads)

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
        optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=self.weight_decay
        )
        num_steps = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            done = min((step + 1) / (num_steps + 1), 1.0)
            return done / self.warmup if done < self.warmup else (1 + math.cos(math.pi * done)) / 2

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
