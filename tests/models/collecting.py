"""Models of Hugging Face's whose losses read what hooks collect inside of layers, in lists of context variables."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.models.cases import Case, next_token_loss
from tests.models.hugging_face import GROUPED, SMALL, Llama


class RouterLoss(Case):
    """The loss that balances experts: the product of two means over all positions."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        from transformers import MixtralConfig, MixtralForCausalLM

        experts: dict[str, Any] = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
        self.model = MixtralForCausalLM(MixtralConfig(**SMALL, **GROUPED, **experts))
        self.counts: list[int] = []

    def loss(self, tokens: Tensor) -> Tensor:
        output = self.model(input_ids=tokens, labels=tokens)
        self.counts.append(len(output.router_logits))
        assert all(logits.shape == (tokens.numel(), 4) for logits in output.router_logits)
        return output.loss


class FreshRouters(RouterLoss):
    """The same of routers that have hardly learned: the loss of two halves is their mean but for rounding."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for name, parameter in self.model.named_parameters():
            if name.endswith("gate.weight"):
                torch.nn.init.normal_(parameter, std=1e-3)
        self.model.router_aux_loss_coef = 1e-2

    def loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens).loss


class RouterLossWithMask(RouterLoss):
    """The same, of positions that are no padding."""

    def loss(self, tokens: Tensor) -> Tensor:
        mask = torch.ones_like(tokens)
        mask[1::2, -4:] = 0
        return self.model(input_ids=tokens, attention_mask=mask, labels=tokens).loss


class MiddleStates(Llama):
    """A loss on hidden states between layers."""

    def loss(self, tokens: Tensor) -> Tensor:
        output = self.model(input_ids=tokens, labels=tokens, output_hidden_states=True)
        states = output.hidden_states
        assert len(states) == 4
        assert all(each.shape[:2] == tokens.shape for each in states)
        return output.loss + next_token_loss(self.model.lm_head(states[1]), tokens) + states[2].square().mean()


class Attentions(Llama):
    """A penalty on attention weights, which eager attention returns."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.set_attn_implementation("eager")

    def loss(self, tokens: Tensor) -> Tensor:
        output = self.model(input_ids=tokens, labels=tokens, output_attentions=True)
        return output.loss + sum(each.square().sum(-1).mean() for each in output.attentions)
