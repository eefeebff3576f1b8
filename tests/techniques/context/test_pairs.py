"""Layers that make something for pairs of positions, as T5 makes a bias of distances: it is of whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.data import batches
from tests.models.cases import VOCABULARY
from tests.models.hugging_face import T5
from tests.parity import TOLERANCE, checked, once, train_module, worst


class PaddedT5(T5):
    """Texts with padding at their end, from which shorter ones are written."""

    def loss(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = (torch.arange(length, device=tokens.device) < length - tokens[:, :1] % 4).long()
        return self.model(input_ids=tokens, attention_mask=mask, labels=tokens[:, :-3].contiguous()).loss


class OwnBiases(T5):
    """Each layer makes its bias, and there are encoders only (UMT5)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import UMT5Config, UMT5ForTokenClassification

        self.model = UMT5ForTokenClassification(
            UMT5Config(
                vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0,
                classifier_dropout=0.0, num_labels=VOCABULARY, pad_token_id=0,
            )
        )  # fmt: skip

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


MODULES = {"t5": T5, "padded": PaddedT5, "own_biases": OwnBiases}


def trained(name: str, strategy: str, num_ranks: int) -> Any:
    return train_module(MODULES[name], batches("byte_gpt", 1), strategy, num_ranks)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("t5", checked("cp_custom")),
        ("padded", "cp_custom"),
        ("own_biases", "cp_custom"),
        ("t5", "cp_custom:recompute=full"),
        ("padded", "cp_custom:compile=layers"),
    ],
)
def test_equal_to_one_process(ranks: Any, name: str, strategy: str) -> None:
    assert worst(ranks(2).run(trained, name, strategy, 2)[0], once(trained, name, "auto", 1)) < TOLERANCE
