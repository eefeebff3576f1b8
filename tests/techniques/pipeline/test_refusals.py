"""What cannot be pipelined is refused, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, build_strategy
from tests.data import data_of
from tests.models.cases import CASES
from tests.models.pipelined import Deep
from tests.models.tables import PIPELINE_MODULES
from tests.parity import make_trainer


class Skips(Deep):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Penalty(Deep):
    """Reads the parameters of all layers in the loss."""

    def loss(self, tokens: Tensor) -> Tensor:
        return super().loss(tokens) + 1e-3 * sum(p.square().sum() for p in self.model.blocks.parameters())


class TakesGradients(Deep):
    """Takes a gradient of what a layer returns, within the step."""

    def loss(self, tokens: Tensor) -> Tensor:
        hidden = self.model.tokens(tokens).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.model.blocks[0](hidden).sum(), hidden)
        return super().loss(tokens) + gradient.mean()


class Compiled(Deep):
    """Compiles the model as a whole, into a module around it."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model = torch.compile(self.model, backend="eager")  # type: ignore[assignment]


class CompiledInPlace(Deep):
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.model.compile(backend="eager")


def refusal(kind: str, strategy: str, num_ranks: int, batch: int) -> str:
    modules = {
        "skips": Skips,
        "gradients": TakesGradients,
        "penalty": Penalty,
        "compiled": Compiled,
        "compiled in place": CompiledInPlace,
        **PIPELINE_MODULES,
        **CASES,
    }
    try:
        loader = DataLoader(data_of(kind if kind in CASES else "byte_gpt", 4 * batch, batch), batch_size=batch)
        make_trainer(build_strategy(strategy), num_ranks).fit(modules[kind]("sgd"), loader)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "strategy", "batch", "words"),
    [
        ("gan", "pp_custom", 4, ["GAN has no stack"]),
        ("lstm", "pp_custom", 4, ["pipeline=2", "LSTMModel has no stack"]),
        (
            "encoder_decoder",
            "pp_custom:stages=[2,1]",
            4,
            ["but transformer.encoder.layers and transformer.decoder.layers have together 4; give 2 numbers"],
        ),
        ("byte_gpt", "pp_custom:schedule=zbv", 4, ["has 3 layers, fewer than the 4 stages"]),
        ("deep", "pp_custom:schedule=2f2b", 4, ["schedule='2f2b' is unknown", "gpipe, 1f1b, interleaved"]),
        ("deep", "pp_custom:schedule=interleaved", 4, ["needs virtual_stages of at least 2"]),
        ("deep", "pp_custom:virtual_stages=2", 4, ["virtual_stages=2 with schedule='1f1b'", "interleaved"]),
        ("deep", "pp_custom:microbatches=1", 4, ["microbatches=1 are fewer than 2, which schedule='1f1b' needs"]),
        ("deep", "pp_custom:microbatches=3", 4, ["4 samples a rank", "microbatches=3", "possible: 2, 4"]),
        ("deep", "pp_custom", 7, ["7 samples a rank", "no divisor from 2 to 4"]),
        ("deep", "pp_custom:stages=[1,2]", 4, ["stages=[1, 2] are 3 layers, but model.blocks has 4"]),
        ("deep", "pp_custom:stages=[4]", 4, ["stages=[4] are 1 stages, but there are 2"]),
        ("deep", "pp_custom:stages=[4,0]", 4, ["at least 1"]),
        ("deep", "pp_custom:offload=all,optimizer_in_backward=true", 4, ["2 problems", "offload='all'"]),
        ("deep", "pp_custom:forward_methods=[model.forward]", 4, ["forward_methods=['model.forward']"]),
        ("skips", "pp_custom", 4, ["training_step returns NoneType"]),
        ("gradients", "pp_custom", 4, ["takes gradients by itself (torch.autograd.grad)"]),
        ("compiled", "pp_custom", 4, ["model is compiled together with the layers in it", "compile=layers"]),
        ("compiled in place", "pp_custom", 4, ["model is compiled together with the layers in it"]),
        ("penalty", "pp_custom", 4, ["uses model.blocks.0", "outside of the layer that owns it"]),
    ],
)
def test_what_cannot_be_pipelined_is_refused(
    ranks: Any, kind: str, strategy: str, batch: int, words: list[str]
) -> None:
    size = 4 if "context" in strategy else 2
    messages = ranks(size).run(refusal, kind, strategy, size, batch)
    assert all(messages), messages
    text = "\n".join(messages)
    assert [word for word in words if word not in text] == [], text
