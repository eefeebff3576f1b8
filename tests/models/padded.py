"""A loss over labels of unequal length."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.data import IGNORED
from tests.models.cases import GPT, VOCABULARY, Case


class Padded(Case):
    """A mean over the labels that are not ignored, as people write it."""

    def __init__(self, kind: str = "cross_entropy") -> None:
        super().__init__("adamw")
        self.model = GPT()
        self.kind = kind
        self.register_buffer("class_weights", torch.linspace(0.5, 2.0, VOCABULARY))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits, labels = self.model(tokens).flatten(0, 1), labels.flatten()
        if self.kind == "nll":
            return nn.NLLLoss()(logits.log_softmax(-1), labels)
        if self.kind == "by hand":
            is_valid = labels != IGNORED
            losses = -logits.log_softmax(-1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
            return (losses * is_valid).sum() / is_valid.sum().clamp(min=1)
        return F.cross_entropy(logits, labels, weight=self.class_weights if self.kind == "weights" else None)
