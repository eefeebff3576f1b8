"""Modules whose layers leave something for the step elsewhere than in their results, as people write it by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models.cases import VOCABULARY, Block, Case, next_token_loss

WIDTH = 16
_everywhere: dict[str, list[Tensor]] = {"outputs": []}


class Experts(Block):
    """A layer with a router, whose balance is a product of two means over all positions."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.aux_loss: Any = 0.0

    def balance(self, probabilities: Tensor) -> Tensor:
        chosen = probabilities.detach().argmax(-1)
        shares = torch.stack([(chosen == n).float().mean() for n in range(4)])
        return 4 * (shares * probabilities.mean((0, 1))).sum()

    def mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.router(x).softmax(-1)
        outputs = torch.stack([expert(x) for expert in self.experts], -1)
        return super().forward(x + (outputs * probabilities[..., None, :]).sum(-1)), probabilities

    def forward(self, x: Tensor) -> Tensor:
        x, probabilities = self.mixed(x)
        self.leave(probabilities)
        return x

    def leave(self, probabilities: Tensor) -> None:
        self.aux_loss = self.balance(probabilities)


class Mixture(Case):
    """The step sums what each layer has left in an attribute."""

    layer: type[Experts] = Experts

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def aux(self) -> Any:
        return sum(layer.aux_loss for layer in self.layers)

    def loss(self, tokens: Tensor) -> Tensor:
        loss = next_token_loss(self(tokens), tokens)
        aux = self.aux()
        self.log("aux", aux)
        return loss + 0.5 * aux


class LogitsLayer(Experts):
    def leave(self, probabilities: Tensor) -> None:
        self.last = {"probabilities": [probabilities]}


class Probabilities(Mixture):
    """Layers leave values of all positions, in a dict; the step computes the balance."""

    layer = LogitsLayer

    def aux(self) -> Any:
        return sum(layer.balance(layer.last["probabilities"][0]) for layer in self.layers)


class BufferLayer(Experts):
    def __init__(self) -> None:
        super().__init__()
        del self.aux_loss
        self.register_buffer("aux_loss", torch.zeros(()), persistent=False)


class InBuffers(Mixture):
    """What they leave are buffers."""

    layer = BufferLayer


class ReturningLayer(Experts):
    def forward(self, x: Tensor) -> Any:
        x, probabilities = self.mixed(x)
        return x, self.balance(probabilities)


class Returned(Mixture):
    """Each layer returns its loss beside its hidden states."""

    layer = ReturningLayer

    def loss(self, tokens: Tensor) -> Tensor:
        x, total = self.tokens(tokens), 0.0
        for layer in self.layers:
            x, aux = layer(x)
            total = total + aux
        return next_token_loss(self.head(x), tokens) + 0.5 * total


class Hooked(Mixture):
    """Hooks on inner modules append what these return to a list on the module, which the step clears."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.collected: list[Tensor] = []
        for layer in self.layers:
            layer.router.register_forward_hook(self.collect)

    def collect(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.collected.append(output)

    def aux(self) -> Any:
        assert len(self.collected) == 4
        found = sum(output.square().mean((0, 1)).square().mean() for output in self.collected)
        self.collected.clear()
        return found


class ClearedLater(Hooked):
    """The list is cleared before each batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.collected.clear()

    def aux(self) -> Any:
        assert len(self.collected) == 4
        return sum(output.square().mean((0, 1)).square().mean() for output in self.collected)


class HookedLayers(Hooked):
    """Hooks on layers themselves, one of which changes what its layer returns."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for layer in self.layers:
            layer.router._forward_hooks.clear()
            layer.register_forward_hook(self.collect)
        self.layers[1].register_forward_hook(lambda module, args, output: output * 1.5)
        self.layers[2].register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))


class Collector:
    """An object of the user's that catches outputs by name."""

    def __init__(self) -> None:
        self.outputs: dict[str, Tensor] = {}

    def hook(self, name: str) -> Any:
        def catch(module: nn.Module, args: Any, output: Tensor) -> None:
            self.outputs[name] = output

        return catch


class Caught(Mixture):
    """Outputs of inner modules, caught in an object; one of each stage, and a part of it only is used."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.collector = Collector()
        for number, layer in enumerate(self.layers):
            layer.router.register_forward_hook(self.collector.hook(f"router {number}"))

    def aux(self) -> Any:
        outputs = self.collector.outputs
        return outputs["router 0"].mean((0, 1)).prod() + outputs["router 3"].square().mean()


class Elsewhere(Mixture):
    """Hooks append to a list of the program's, which the module does not hold."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        for layer in self.layers:
            layer.router.register_forward_hook(self.collect)

    @staticmethod
    def collect(module: nn.Module, args: Any, output: Tensor) -> None:
        _everywhere["outputs"].append(output)

    def aux(self) -> Any:
        found = sum(logits.mean((0, 1)).prod() for logits in _everywhere["outputs"])
        _everywhere["outputs"].clear()
        return found


class InLater(Mixture):
    """The step takes what layers have left from the third batch on only."""

    def aux(self) -> Any:
        return super().aux() if self.global_step > 1 else torch.zeros(())


class NumberLayer(Experts):
    def leave(self, probabilities: Tensor) -> None:
        self.aux_loss = self.balance(probabilities)
        self.entropy = float(self.aux_loss.detach())


class Numbers(Mixture):
    """Layers also leave plain numbers, which the step logs."""

    layer = NumberLayer

    def aux(self) -> Any:
        self.log("entropy", sum(layer.entropy for layer in self.layers))
        return super().aux()


class Counted(HookedLayers):
    """One of the hooks counts calls, which the step logs."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.calls = 0
        self.layers[2].register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def aux(self) -> Any:
        self.log("calls", float(self.calls))
        return super().aux() * (1 + self.calls % 3)


LEFT: dict[str, type[Mixture]] = {
    "attributes": Mixture,
    "probabilities": Probabilities,
    "buffers": InBuffers,
    "returned": Returned,
    "hooked": Hooked,
    "cleared later": ClearedLater,
    "hooked layers": HookedLayers,
    "caught": Caught,
    "elsewhere": Elsewhere,
    "counted": Counted,
    "numbers": Numbers,
}
"""Modules that every pipeline trains as one process does."""
