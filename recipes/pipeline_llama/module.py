"""Hugging Face's Llama as it comes, trained with plain Lightning."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typing_extensions import override


class HFLlama(LightningModule):
    """Llama from random weights on bytes; logs `train_loss` in nats and `val_bpb` in bits per byte.

    A batch is int64 of shape (batch, length), values 0 to 255, with length at most `context`.

    Args:
        context: The largest length of a sequence, in bytes.
        width: Features of a position.
        hidden_width: Features inside of an MLP.
        num_layers: The number of decoder layers.
        num_heads: Heads of queries; divides `width`.
        num_kv_heads: Heads of keys and values; divides `num_heads`.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 128,
        hidden_width: int = 256,
        num_layers: int = 8,
        num_heads: int = 8,
        num_kv_heads: int = 4,
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        config = LlamaConfig(
            vocab_size=256,
            max_position_embeddings=context,
            hidden_size=width,
            intermediate_size=hidden_width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config)

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
