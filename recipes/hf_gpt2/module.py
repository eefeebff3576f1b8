"""Hugging Face's GPT-2 as it comes, trained with plain Lightning."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from typing_extensions import override


class HFGPT2(LightningModule):
    """GPT-2 from random weights on bytes, embeddings tied; logs `train_loss` in nats and `val_bpb` in bits per byte.

    A batch is int64 of shape (batch, length), values 0 to 255, with length at most `context`.

    Args:
        context: The largest length of a sequence, in bytes.
        width: Features of a position.
        num_layers: The number of transformer blocks.
        num_heads: Divides `width`.
        dropout: The share of features that is dropped in training, 0 to 1.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        num_layers: int = 4,
        num_heads: int = 8,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        config = GPT2Config(
            vocab_size=256,
            n_positions=context,
            n_embd=width,
            n_layer=num_layers,
            n_head=num_heads,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            resid_pdrop=dropout,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = GPT2LMHeadModel(config)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("val_bpb", loss / math.log(2), prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
