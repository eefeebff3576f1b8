"""Models with four layers, and what people do before, between and after them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import GPT, ByteGPT, Case, next_token_loss


class Deep(ByteGPT):
    """Four layers."""

    def __init__(self, optimizer: str = "adamw", depth: int = 4) -> None:
        super().__init__(optimizer)
        self.model = GPT(depth=depth)


class DeepTied(Deep):
    """Embedding and head are one parameter, on the first and on the last stage."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.head.weight = self.model.tokens.weight


class HeadFirst(Case):
    """Everything is registered in another order than it is called; a parameter is read without its module."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        gpt = GPT(depth=4)
        self.norm, self.head, self.blocks, self.tokens = gpt.norm, gpt.head, gpt.blocks, gpt.tokens
        self.middle = nn.Parameter(torch.randn(16))

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden)
            if index == 1:  # between the last layer of a stage and the first of the next
                hidden = hidden * 1.5 + self.middle
        return next_token_loss(self.head(self.norm(hidden)), tokens)


class ReadsValues(Deep):
    """Looks at the loss, draws a branch from it, and keeps state on the module."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        logits = self(batch[0])
        loss = next_token_loss(logits, batch[0])
        self.seen.append(loss.item())
        self.log("train_loss", loss)
        return {"loss": loss, "logits": logits.detach(), "count": 3}


class Recurrent(Deep):
    """Layers with a GRU, whose result torch transposes in place."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.linear = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(self.gru(x)[0])

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(self.Layer() for _ in range(4))


class Transposed(Deep):
    """A parameter of other strides, which the first and the last stage use."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.mix = nn.Parameter(torch.randn(16, 16).mul(0.3).t())

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens) @ self.mix
        for block in self.model.blocks:
            hidden = block(hidden)
        return next_token_loss(self.model.head(self.model.norm(hidden @ self.mix)), tokens)


class FirstFrozen(Deep):
    """Nothing is trained on the first stage; the step takes no number of the batch."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for part in (self.model.tokens, self.model.positions, *self.model.blocks[:2]):
            part.requires_grad_(False)

    def training_step(self, batch: Any) -> Tensor:
        return self.loss(*batch)


class ReturnsTuples(Deep):
    """Layers that return more than hidden states, and take them by name."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(_WithWeights(block) for block in self.model.blocks)

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens) + self.model.positions.weight
        for block in self.model.blocks:
            hidden, _, (_, _) = block(hidden=hidden, scale=torch.full((1,), 0.5))
        return next_token_loss(self.model.head(self.model.norm(hidden)), tokens)


class _WithWeights(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, scale: Tensor, hidden: Tensor) -> Any:
        self.seen += len(hidden) if self.training else 0
        hidden = self.block(hidden) * scale
        return hidden, hidden.sum(), (3, None)


class CutGraph(GPT):
    """Activations lose their graph before some of four blocks, as in training by local losses or of a new head."""

    def __init__(self, places: tuple[int, ...]) -> None:
        super().__init__(depth=4)
        self.places = places

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for place, block in enumerate(self.blocks):
            x = block(x.detach() if place in self.places else x)
        return self.head(self.norm(x))


class OfCutGraph(ByteGPT):
    def __init__(self, *places: int) -> None:
        super().__init__("adamw")
        self.model = CutGraph(places)
