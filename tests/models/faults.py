"""Modules whose step is not what one process computes, under some strategy, and modules with hooks around a step."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics import SumMetric

from tests.data import IGNORED
from tests.models.cases import ByteGPT, next_token_loss, optimizer_of
from tests.models.user_code import Tokens


class SumOfSamples(ByteGPT):
    """A loss that is a sum over the batch: a mean over microbatches is a part of it."""

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), tokens) * len(tokens)


class ComparesSamples(ByteGPT):
    """A loss whose negatives are the other samples of the batch."""

    def loss(self, tokens: Tensor) -> Tensor:
        outputs = F.normalize(self.model(tokens).mean(1), dim=-1)
        return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


class UnevenLabels(ByteGPT):
    """A mean over the tokens that count, of which each sample has another number."""

    def loss(self, tokens: Tensor) -> Tensor:
        lengths = tokens[:, 0] % (tokens.shape[1] - 2) + 2
        labels = tokens.masked_fill(torch.arange(tokens.shape[1]) >= lengths[:, None], IGNORED)
        return F.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


class _WithPenalty(nn.Module):
    """A layer that keeps a penalty, which is no sum over positions, for the loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.penalty: Any = 0.0

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.layer(hidden)
        self.penalty = result.mean(dim=(0, 1)).square().sum()
        return result


class PenaltyOfLayers(ByteGPT):
    """An auxiliary loss as routers have it: ranks that share a sequence each see a part of the positions."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(map(_WithPenalty, self.model.blocks))

    def loss(self, tokens: Tensor) -> Tensor:
        loss = next_token_loss(self.model(tokens), tokens)
        return loss + sum(block.penalty for block in self.model.blocks)  # type: ignore[misc]


class AnyHooks(ByteGPT):
    """Hooks that change attributes before the first step, change gradients, log, print and count."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.factor, self.steps_seen, self.notes = 1.0, 0, {"steps": 0}

    def on_train_start(self) -> None:
        self.factor = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        self.steps_seen += 1
        self.notes["steps"] += 1
        print(f"step {self.steps_seen}")
        loss = self.factor * self.loss(*batch)
        self.log_dict({"train_loss": loss, "step": float(self.steps_seen)})
        return {"loss": loss}

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before", loss.detach())

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ReadsShards(ByteGPT):
    """A hook that knows nothing but shards."""

    def on_after_backward(self) -> None:
        gradient: Any = self.model.head.weight.grad
        gradient.to_local()


class WithDropout(ByteGPT):
    """Draws random numbers in its layers."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        for block in self.model.blocks:
            block.mlp = nn.Sequential(*block.mlp, nn.Dropout(0.5))  # type: ignore[union-attr,assignment]


class LogsOneParameter(ByteGPT):
    """Norms by hand: of the whole gradient, and of this rank's part, which nobody sees in a number."""

    def on_after_backward(self) -> None:
        gradient = self.model.head.weight.grad
        assert gradient is not None
        self.log("norm", gradient.norm())
        self.log("read", float(gradient.norm()))
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        self.log("part", part.norm())


class CannotBeCopiedOnRank0(ByteGPT):
    """Holds on rank 0 what nobody can copy."""

    def setup(self, stage: str) -> None:
        self.lock = threading.Lock() if self.global_rank == 0 else None


class GrowsOnRank0(ByteGPT):
    """A hook that gives the module another submodule, on one rank."""

    def on_train_start(self) -> None:
        if self.global_rank == 0:
            self.probe = nn.Identity()


class FailsOnCopyOfRank0(ByteGPT):
    """A step that does not run on a second object, on one rank."""

    def on_fit_start(self) -> None:
        self.is_original = [id(self)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_rank == 0 and self.is_original != [id(self)]:
            raise RuntimeError("not the module itself")
        return super().training_step(batch, batch_idx)


class CountsInHooks(ByteGPT):
    """Gives numbers to metrics in hooks around backward: in one that the copy has, and in one that it has not.

    Args:
        optimizer: Its name.
        twice: Whether the module itself counts twice, and its copy once.
    """

    def __init__(self, optimizer: str = "sgd", *, twice: bool = False) -> None:
        super().__init__(optimizer)
        self.twice, self.is_original = twice, [0]
        self.counted, self.elsewhere = SumMetric(), SumMetric()

    def on_train_start(self) -> None:
        self.is_original = [id(self)]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.elsewhere.update(5.0)

    def on_before_backward(self, loss: Tensor) -> None:
        self.counted.update(2.0 if self.twice and self.is_original == [id(self)] else 1.0)
        self.elsewhere.update(1.0)

    def on_after_backward(self) -> None:
        self.counted.update(4.0)


class CountsTwice(CountsInHooks):
    """Counts twice in a hook."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer, twice=True)


class _Scaled(nn.Module):
    """A layer whose output is another one in the module that is trained than in a copy of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.factor, self.is_original = layer, 1.0, [0]

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.layer(hidden)
        return result * self.factor if self.is_original == [id(self)] else result


class OtherLayer(ByteGPT):
    """Its second layer is another one than that of a plain copy."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.blocks = nn.ModuleList(map(_Scaled, self.model.blocks))
        self.num_steps = 0

    def on_train_start(self) -> None:
        layer: Any = self.model.blocks[1]
        layer.is_original, layer.factor = [id(layer)], -1.0


class FailsInSecondRun(OtherLayer):
    """Raises when the module itself, and not its copy, runs a second time, on one rank."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.is_original = [id(self)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        if self.is_original == [id(self)] and self.num_steps > 1 and self.global_rank == 1:
            raise RuntimeError("not twice")
        return super().training_step(batch, batch_idx)


class OtherOnEachRun(OtherLayer):
    """A loss that depends on how often the module itself has run."""

    def on_train_start(self) -> None:
        super().on_train_start()
        self.is_original = [id(self)]

    def loss(self, tokens: Tensor) -> Tensor:
        self.num_steps += self.is_original == [id(self)]
        return super().loss(tokens) * (1 + self.num_steps)


CALLS: list[float] = []
"""What modules keep outside of themselves."""


class LogsCalls(ByteGPT):
    """Logs how often it was called, as it would log the time."""

    def loss(self, tokens: Tensor) -> Tensor:
        CALLS.append(1.0)
        self.log("calls", float(len(CALLS)))
        return super().loss(tokens)


class LogsCallsOfAnotherLayer(OtherLayer):
    """The same, with a layer that is another one than that of a plain copy."""

    def loss(self, tokens: Tensor) -> Tensor:
        CALLS.append(1.0)
        self.log("calls", float(len(CALLS)))
        return super().loss(tokens)


class ReadsCalls(ByteGPT):
    """A loss that depends on how often any module was called."""

    def loss(self, tokens: Tensor) -> Tensor:
        CALLS.append(1.0)
        return super().loss(tokens) * len(CALLS)


class ManualStep(OtherLayer):
    """Manual optimization, with a scheduler that steps in each batch before the update.

    Args:
        optimizer: Its name.
        kind: ``"wrapped"``, ``"raw"`` or ``"closure"`` for the optimizer that updates, ``"backward"`` for a backward
            that nobody hears of.
        is_other: Whether a layer is another one than in a copy.
    """

    def __init__(self, optimizer: str = "sgd", *, kind: str = "wrapped", is_other: bool = False) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False
        self.kind, self.is_other = kind, is_other

    def on_train_start(self) -> None:
        if self.is_other:
            super().on_train_start()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers(use_pl_optimizer=self.kind != "raw")
        schedule: Any = self.lr_schedulers()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing is updated before it
            schedule.step()
        loss = self.loss(*batch)
        self.log("train_loss", loss)

        def closure() -> None:
            optimizer.zero_grad()
            self.manual_backward(loss)

        if self.kind == "closure":
            optimizer.step(closure)
        elif self.kind == "backward":
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        else:
            closure()
            self.clip_gradients(optimizer, gradient_clip_val=1e-4, gradient_clip_algorithm="value")
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self.optimizer_name, self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


class ManualLogsCalls(ManualStep):
    """Logs how often it was called, as it would log the time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        CALLS.append(1.0)
        self.log("calls", float(len(CALLS)))
        return super().training_step(batch, batch_idx)


class SharpnessAware(Tokens):
    """Moves the weights along the first gradients, and steps by those it finds there (Foret et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        parameters: list[Any] = list(self.parameters())
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        with torch.no_grad():
            moves = [0.5 * parameter.grad / norm for parameter in parameters]
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


class RaisingCopy(SharpnessAware):
    """Whose copy fails on one rank, behind the first backward."""

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss, *args, **kwargs)
        if self.global_rank == 1 and type(self.trainer) is not L.Trainer:
            raise ValueError("no copy of mine")
