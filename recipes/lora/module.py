"""A causal language model of Hugging Face, fine-tuned whole or by adapters of low rank, with plain Lightning."""

from __future__ import annotations

import math

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from typing_extensions import override

SMALL = LlamaConfig(
    vocab_size=256,
    max_position_embeddings=64,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    bos_token_id=None,
    eos_token_id=None,
    use_cache=False,
)
"""A Llama on bytes, built from random weights where no pretrained model is named."""


class LowRank(nn.Module):
    """A linear map that stays as it is, and one of low rank beside it that is trained (Hu et al. 2021).

    (..., features in) -> (..., features out); at first the results are those of `base` alone.

    Args:
        base: The map of the pretrained model.
        rank: Features between the two thin maps.
        scale: The factor on what they add.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        self.scale = scale
        nn.init.zeros_(self.up.weight)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.up(self.down(x))


class FineTuned(LightningModule):
    """Trains a causal language model; logs `train_loss` in nats per token and `val_bpb` in bits per token.

    A batch is int64 of shape (batch, length), tokens of the model.

    Args:
        pretrained: A folder with a model of Hugging Face, or a name of the Hub; without one it is `SMALL`.
        rank: Of the adapters; 0 trains all parameters and adds none.
        alpha: The factor on what the adapters add, times `rank`.
        targets: Last parts of the names of the linear maps that are given adapters.
        learning_rate: Of AdamW.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        rank: int = 8,
        alpha: float = 16.0,
        targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.model = AutoModelForCausalLM.from_pretrained(pretrained) if pretrained else LlamaForCausalLM(SMALL)
        if rank:
            self.model.requires_grad_(False)
            names = [name for name, _ in self.model.named_modules() if name.rpartition(".")[2] in targets]
            for name in names:
                base = self.model.get_submodule(name)
                self.model.set_submodule(name, LowRank(base, rank, alpha / rank))

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
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.learning_rate)
