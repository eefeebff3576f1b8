"""Modules whose steps keep something for later: each step reads what the ones before have left."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.parametrizations import spectral_norm

from tests.models.cases import VOCABULARY, Block, ByteGPT, next_token_loss


class WithSpectralNorm(ByteGPT):
    """A head that takes one step of a power iteration in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head = spectral_norm(self.model.head)


class WithSpectralNorms(ByteGPT):
    """The same in each layer, or before the layers."""

    def __init__(self, *, in_layers: bool = True) -> None:
        super().__init__()
        for block in self.model.blocks if in_layers else ():
            block.mlp[0] = spectral_norm(block.mlp[0])
        if not in_layers:
            self.model.tokens = spectral_norm(self.model.tokens)


class WithPeaks(ByteGPT):
    """Layers that keep the largest activation that they have had, and divide by it."""

    class Layer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            result = super().forward(x)
            if self.training:
                with torch.no_grad():
                    self.peak.copy_(torch.maximum(0.9 * self.peak, result.abs().max()))
            return result / self.peak

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(self.Layer() for _ in range(4))


class CountsSteps(ByteGPT):
    """Counts steps before the stack, and weights the loss with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def loss(self, tokens: Tensor) -> Tensor:
        self.num_steps += 1
        return super().loss(tokens) * (1 + 0.1 * self.num_steps)


class CountsSamples(ByteGPT):
    """Counts samples behind the stack, in a tensor of one element that replaces the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.num_samples = torch.zeros(())

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        self.num_samples = self.num_samples + len(tokens)
        return loss * (1 + self.num_samples / 100)


class CountsInATable(ByteGPT):
    """Counts steps in a dict, which stays as long as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"steps": 0}

    def loss(self, tokens: Tensor) -> Tensor:
        self.counts["steps"] += 1
        return super().loss(tokens) * (1 + 0.1 * self.counts["steps"])


class RemembersLosses(ByteGPT):
    """Keeps the last two losses, in a list under a name of its own, and weights the next one with them."""

    def __init__(self) -> None:
        super().__init__()
        self._recent: list[float] = []

    def loss(self, tokens: Tensor) -> Tensor:
        loss = super().loss(tokens)
        factor = 1 + 0.1 * sum(self._recent)
        self._recent = [*self._recent, loss.item()][-2:]
        return loss * factor


class GrowsWarmer(ByteGPT):
    """Scales the hidden states before the stack with the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        model = self.model
        x = model.tokens(tokens) * (1 + 0.1 * self.num_calls)
        for block in model.blocks:
            x = block(x)
        return model.head(model.norm(x))


class WithCenter(ByteGPT):
    """A running mean of logits in a buffer, as DINO has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(VOCABULARY))

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens)
        self.center.mul_(0.9).add_(0.1 * logits.detach().mean((0, 1)))
        return next_token_loss(logits - self.center, tokens)


class CarriesStates(ByteGPT):
    """Begins each step with what the one before has ended with, under a name that is new in the first step."""

    def loss(self, tokens: Tensor) -> Tensor:
        model = self.model
        x = model.tokens(tokens) + model.positions(torch.arange(tokens.shape[1]))
        if hasattr(self, "states"):
            x = x + 0.3 * self.states
        for block in model.blocks:
            x = block(x)
        self.states = self.kept(x.detach())
        return next_token_loss(model.head(model.norm(x)), tokens)

    def kept(self, states: Tensor) -> Tensor:
        """`[1, length, width]` of hidden states `[batch, length, width]`."""
        return states.mean(0, keepdim=True)


class CarriesSamples(CarriesStates):
    """The same, sample by sample."""

    def kept(self, states: Tensor) -> Tensor:
        """All of them."""
        return states


class ComparesWithLast(ByteGPT):
    """Keeps the logits of the last step, for a penalty behind the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self(tokens)
        change = 0.0 if self.last is None else (logits - self.last).square().mean()
        self.last = logits.detach()
        return next_token_loss(logits, tokens) + 0.1 * change


class CachesMask(ByteGPT):
    """Makes a table in its first step, and keeps it."""

    def loss(self, tokens: Tensor) -> Tensor:
        if not hasattr(self, "weights"):
            self.weights = torch.linspace(0.5, 1.5, VOCABULARY)
        return next_token_loss(self(tokens) * self.weights, tokens)


class Meter:
    """A mean, as many examples have it."""

    def __init__(self) -> None:
        self.sum, self.count = 0.0, 0

    def update(self, value: float, number: int) -> None:
        self.sum, self.count = self.sum + value * number, self.count + number


class CollectsOutputs(ByteGPT):
    """Lightning's own way to see all outputs of an epoch: a list, which the end of the epoch reads and clears."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()
        self.training_step_outputs: list[Tensor] = []
        self.validation_step_outputs: list[dict[str, Tensor]] = []
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss.detach())
        self.meter.update(loss.item(), len(batch[0]))
        return loss

    def on_train_epoch_end(self) -> None:
        self.means += [torch.stack(self.training_step_outputs).mean().item(), self.meter.sum / self.meter.count]
        self.training_step_outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.validation_step_outputs.append({"logits": logits, "loss": next_token_loss(logits, batch[0])})

    def on_validation_epoch_end(self) -> None:
        logits = torch.cat([each["logits"] for each in self.validation_step_outputs])
        losses = torch.stack([each["loss"] for each in self.validation_step_outputs])
        self.means += [logits.square().mean().item(), losses.mean().item()]
        self.validation_step_outputs.clear()


class MakesLists(ByteGPT):
    """What hooks read is made where it is first needed: numbers, lists and dicts that are new in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.latest = loss.item()
        self.__dict__.setdefault("of_steps", {})[batch_idx] = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.means.append(self.latest)

    def on_train_epoch_end(self) -> None:
        self.means += self.of_steps.values()
        del self.of_steps

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not hasattr(self, "outputs"):
            self.outputs: list[Tensor] = []
        self.outputs.append(self(batch[0]).logsumexp(-1).mean(-1))
        self.num_tokens = batch[0].numel()

    def on_validation_epoch_end(self) -> None:
        self.means += [float(self.num_tokens), *torch.cat(self.outputs).tolist()]
        del self.outputs


class WithGradientPenalty(ByteGPT):
    """A gradient of gradients through one layer, as WGAN-GP has it."""

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens).detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # the only one with second derivatives
            energy = self.model.blocks[0](hidden).square().sum()
        (gradient,) = torch.autograd.grad(energy, hidden, create_graph=True)
        return super().loss(tokens) + 1e-3 * gradient.square().mean()


KEEPING: dict[str, Callable[[], Any]] = {
    "spectral norm": WithSpectralNorm,
    "spectral norms of layers": WithSpectralNorms,
    "spectral norm before the layers": functools.partial(WithSpectralNorms, in_layers=False),
    "peaks": WithPeaks,
    "steps": CountsSteps,
    "samples": CountsSamples,
    "table": CountsInATable,
    "losses": RemembersLosses,
    "calls": GrowsWarmer,
    "center": WithCenter,
    "states": CarriesStates,
    "last": ComparesWithLast,
    "mask": CachesMask,
}
