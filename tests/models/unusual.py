"""Modules whose parameters are made, kept, used or written in unusual ways."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import GPT, VOCABULARY, Block, ByteGPT, Case, next_token_loss


class OptimizerInInit(ByteGPT):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.made = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.made


class Stranger(ByteGPT):
    """Trains a tensor that it did not register."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.extra = [nn.Parameter(torch.zeros(3))]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.1)


class RunsOnOneRank(Case):
    """A bias that only odd samples use, so that a rank may not use it in a step."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = GPT()
        self.sometimes = nn.Linear(VOCABULARY, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(tokens)
        if int(tokens[0, 0]) % 2:
            logits = logits + self.sometimes(logits)
        return next_token_loss(logits, tokens)


class OneRowOnOneRank(ByteGPT):
    """A table that one rank uses, in a row whose shard lies on that rank: the other's shard of the gradient is zero."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.table = nn.Embedding(8, VOCABULARY)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        if self.global_rank == 1:
            logits = logits + self.table.weight[7]
        return next_token_loss(logits, batch[0])


class Thawing(ByteGPT):
    """Trains the head alone, then everything, then all but the embeddings."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.requires_grad_(False)
        self.model.head.requires_grad_(True)

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) * self.gain

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.requires_grad_(True)
        if batch_idx == 3:
            self.model.tokens.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class KeptInAList(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.penalised = [self.model.head.weight]


class WithParameterHook(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.head.weight.register_hook(lambda gradient: gradient * 2)


class SparseTable(ByteGPT):
    def __init__(self) -> None:
        super().__init__()
        self.model.tokens = nn.Embedding(VOCABULARY, 16, sparse=True)


class _ScriptedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.activation = torch.jit.script(nn.Sequential(nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


class ScriptedLayers(ByteGPT):
    """Activations by `torch.jit.script` inside of layers, without parameters."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(_ScriptedBlock() for _ in self.model.blocks)


class ScriptedPart(Case):
    """A part by `torch.jit.script` that has parameters."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = GPT()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(VOCABULARY, VOCABULARY), nn.Tanh()))

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.scripted(self.model(tokens)), tokens)


class WithLBFGS(ByteGPT):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class WithZeroRedundancy(ByteGPT):
    def configure_optimizers(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, of its own scripted functions
            from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9)


class WritesInTheStep(ByteGPT):
    """A target network in the manner of BYOL, updated where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(VOCABULARY, VOCABULARY).requires_grad_(False)

    def loss(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            self.target.weight.mul_(0.9)
        return super().loss(tokens)


class WritesAfterValidation(ByteGPT):
    def on_validation_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)

    on_validation_epoch_end = on_validation_end = on_validation_batch_end


class BuiltAfterChance(ByteGPT):
    """Draws random numbers before the model is built, in `setup` and in `configure_model`."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.first = nn.Linear(4, 4)

    def setup(self, stage: str) -> None:
        if not hasattr(self, "second"):
            self.second = nn.Linear(4, 4)

    def configure_model(self) -> None:
        if not hasattr(self, "third"):
            self.third = nn.Linear(4, 4)

    def loss(self, tokens: Tensor) -> Tensor:
        x = torch.ones(1, 4)
        return super().loss(tokens) + (self.first(x) + self.second(x) + self.third(x)).pow(2).mean()


class PenaltyInTheLoss(ByteGPT):
    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())
