"""Small models of Hugging Face's, with layers and without anything of this package."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.cases import LENGTH, VOCABULARY, Case

HUGGING_FACE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4}


class Llama(Case):
    """Rotary positions from outside of the layers, and fewer heads of keys and values."""

    def __init__(self, optimizer: str = "adamw", kv_heads: int = 2) -> None:
        super().__init__(optimizer)
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                **HUGGING_FACE, num_hidden_layers=3, num_key_value_heads=kv_heads, max_position_embeddings=LENGTH,
                pad_token_id=None,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class OneKeyHead(Llama):
    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer, kv_heads=1)


class OddLength(Llama):
    """A length that no number of ranks divides."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens[:, :13])


class Bert(Case):
    """Attention in both directions, with padding."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from transformers import BertConfig, BertForMaskedLM

        self.model = BertForMaskedLM(
            BertConfig(
                **HUGGING_FACE, num_hidden_layers=2, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        mask = (torch.arange(LENGTH) < 11 + tokens[:, :1] % 5).long()
        return self.model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


class ViT(Case):
    """17 positions: 16 patches and a class token."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from transformers import ViTConfig, ViTForImageClassification

        self.model = ViTForImageClassification(
            ViTConfig(
                image_size=8, patch_size=2, num_channels=1, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_labels=10, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )
        )  # fmt: skip

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(pixel_values=images).logits, labels)


class TwoLengths(Llama):
    """Two forwards of different lengths before one backward, which have the same part of two ranks."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens[:, :15]) + super().loss(tokens)


SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}

GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


class T5(Case):
    """A bias of relative positions that the first layer makes and the others are given, and cross-attention."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from transformers import T5Config, T5ForConditionalGeneration

        self.model = T5ForConditionalGeneration(
            T5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0, use_cache=False,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class Mixtral(T5):
    """Experts, which stay whole."""

    def __init__(self, optimizer: str = "adamw") -> None:
        Case.__init__(self, optimizer)
        from transformers import MixtralConfig, MixtralForCausalLM

        self.model = MixtralForCausalLM(MixtralConfig(**SMALL, **GROUPED, num_local_experts=4))


class Qwen3(T5):
    """A norm over each head of queries and of keys."""

    def __init__(self, optimizer: str = "adamw") -> None:
        Case.__init__(self, optimizer)
        from transformers import Qwen3Config, Qwen3ForCausalLM

        self.model = Qwen3ForCausalLM(Qwen3Config(**SMALL, **GROUPED, head_dim=8))


class CachingLlama(Case):
    def __init__(self) -> None:
        super().__init__("adamw")
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=3,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, pad_token_id=None,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss
