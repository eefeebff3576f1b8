"""Hugging Face's Mixtral as it comes, a decoder with a mixture of experts in each layer, with plain Lightning."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM
from typing_extensions import override


class ByteMixtral(LightningModule):
    """Mixtral from random weights on bytes; logs `train_loss` in nats and `val_bpb` in bits per byte.

    A batch is int64 of shape (batch, length), values 0 to 255, with length at most `context`.

    Args:
        context: The largest length of a sequence, in bytes.
        width: Features of a position.
        hidden_width: Features inside of an expert.
        num_layers: The number of decoder layers.
        num_heads: Heads of queries; divides `width`. There are half as many of keys and values.
        num_experts: Experts of a layer.
        num_chosen: Experts that each position is sent to.
        balance: The factor on the loss that keeps experts equally busy (Shazeer et al. 2017).
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        context: int = 64,
        width: int = 64,
        hidden_width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        num_experts: int = 4,
        num_chosen: int = 2,
        balance: float = 0.02,
        learning_rate: float = 3e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        config = MixtralConfig(
            vocab_size=256,
            max_position_embeddings=context,
            hidden_size=width,
            intermediate_size=hidden_width,
            num_hidden_layers=num_layers,
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads // 2,
            num_local_experts=num_experts,
            num_experts_per_tok=num_chosen,
            output_router_logits=True,
            router_aux_loss_coef=balance,
            bos_token_id=None,
            eos_token_id=None,
            use_cache=False,
        )
        self.model = MixtralForCausalLM(config)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.model(input_ids=batch, labels=batch)
        self.log("train_loss", output.loss, prog_bar=True)
        self.log("balance", output.aux_loss, prog_bar=True)
        return output.loss

    @override
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=batch, labels=batch, output_router_logits=False).loss
        self.log("val_bpb", loss / math.log(2), prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
