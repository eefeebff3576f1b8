"""The check of a split layer: results, what it keeps, and gradients, of which it leaves no trace."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_parallel import ConfigurationError, build_strategy
from lightning_parallel.module.layer_check import Difference, LayerCheck, Wording
from tests.cases import LENGTH, Case
from tests.parity import make_trainer
from tests.test_context import batches
from tests.test_context_borders import Layer, Net
from tests.test_layer_arguments import Conditioned, Plain, condition, net

# Over ranks: right results, wrong gradients ---------------------------------------------------------------------------


class _DividedByLength(torch.autograd.Function):
    """Does nothing, and divides its gradient by the length of a sequence, of which a rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int) -> Tensor:
        ctx.length = length
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.length, None


class _DividedByWidth(torch.autograd.Function):
    """The same with the number of features, as a kernel sees it, which is given this rank's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient / (gradient.to_local() if isinstance(gradient, DTensor) else gradient).shape[-1]


class OfHidden(Net):
    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return _DividedByLength.apply(super().forward(x), x.shape[1])  # type: ignore[no-any-return]

    def layer(self) -> nn.Module:
        return self.Layer()


class OfParameter(Net):
    """The gradient of hidden states is right."""

    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * _DividedByLength.apply(self.scale, x.shape[1]))

    def layer(self) -> nn.Module:
        return self.Layer()


class DividedCondition(Conditioned):
    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        return super().forward(x, _DividedByLength.apply(c, x.shape[1]))


OfArgument = net(DividedCondition, condition)


class OfLastLayer(Net):
    """Its first two layers are right."""

    class Layer(Layer):
        divides = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return _DividedByLength.apply(x, x.shape[1]) if self.divides else x

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers[2].divides = True

    def layer(self) -> nn.Module:
        return self.Layer()


class Keeps(Net):
    """Layers keep a loss of their own, of means over positions."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.balance = x.softmax(-1).mean((0, 1)).square().sum()
            return x

    def layer(self) -> nn.Module:
        return self.Layer()


class WrittenInto(Net):
    """Layers write into what they are given, as code for little memory does."""

    class Layer(OfHidden.Layer):
        def forward(self, x: Tensor) -> Tensor:
            x += self.attention(self.norm1(x))
            return _DividedByLength.apply(x + self.mlp(self.norm2(x)), x.shape[1])  # type: ignore[no-any-return]

    def layer(self) -> nn.Module:
        return self.Layer()


class CheckpointedInside(Net):
    """A layer computes its attention again, in the way that goes around `torch.autograd.grad`."""

    class Layer(OfHidden.Layer):
        def forward(self, x: Tensor) -> Tensor:
            with warnings.catch_warnings(action="ignore"):  # in evaluation, no input needs a gradient
                return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]

    def layer(self) -> nn.Module:
        return self.Layer()


class DividingBlock(Plain):
    """Divides the gradient of features between its maps."""

    def mix(self, x: Tensor) -> Tensor:
        return self.down(_DividedByWidth.apply(F.silu(self.gate(x)) * self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x, self.turn)


OfFeatures = net(DividingBlock)


MODULES: dict[str, type[Case]] = {
    "hidden": OfHidden,
    "parameter": OfParameter,
    "argument": OfArgument,
    "last_layer": OfLastLayer,
    "keeps": Keeps,
    "written_into": WrittenInto,
    "checkpointed": CheckpointedInside,
    "features": OfFeatures,
}
globals().update({module.__name__: module for module in (OfArgument, OfFeatures)})


def refusal(name: str, strategy: str, sanity_steps: int) -> str:
    try:
        trainer = make_trainer(build_strategy(strategy), 2, num_sanity_val_steps=sanity_steps)
        trainer.fit(MODULES[name](), batches("byte_gpt", 1), batches("byte_gpt", 1))
    except ConfigurationError as error:
        return f"{trainer.global_step} steps: {error}"
    return ""


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hidden", "the gradient of hidden states that layers.0 (Layer) computes, but not its result: by "),
        ("parameter", "the gradient of scale that layers.0 (Layer) computes, but not its result: by "),
        ("argument", "the gradient of another argument that layers.0 (DividedCondition) computes"),
        ("last_layer", "the gradient of hidden states that layers.2 (Layer) computes"),
        ("written_into", "the gradient of hidden states that layers.0 (Layer) computes"),
        ("checkpointed", "the gradient of hidden states that layers.0 (Layer) computes"),
        ("keeps", "layers.0 (Layer) keeps a tensor () beside hidden states"),
    ],
)
def test_context_refuses_a_wrong_gradient(ranks: Any, name: str, words: str, attention: str, sanity_steps: int) -> None:
    for message in ranks(2).run(refusal, name, f"cp_custom:context_attention={attention}", sanity_steps):
        assert message.startswith("0 steps: "), message
        assert words in message
        assert "context=1" in message


@pytest.mark.parametrize("strategy", ["cp_custom:recompute=full", "cp_custom:compile=layers"])
def test_context_refuses_it_under_other_policies(ranks: Any, strategy: str) -> None:
    assert "changes the gradient of hidden states" in ranks(2).run(refusal, "hidden", strategy, 0)[0]


@pytest.mark.parametrize("strategy", ["tp_custom", "tp_custom:sequence=true"])
def test_tensor_refuses_a_wrong_gradient(ranks: Any, strategy: str) -> None:
    for message in ranks(2).run(refusal, "features", strategy, 0):
        assert message.startswith("0 steps: "), message
        assert "layers.0 (DividingBlock) computes something else when its linear maps are split" in message
        assert "the gradient of " in message
        assert "tensor=1" in message


# One process ----------------------------------------------------------------------------------------------------------


class Gated(nn.Module):
    """A layer with a parameter that begins at zero, a buffer that counts, dropout, and a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.gate, self.dropout = nn.Linear(4, 4), nn.Parameter(torch.zeros(4)), nn.Dropout(0.5)
        self.register_buffer("runs", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        self.runs += 1
        self.seen.append(len(x))
        return x + self.gate * self.dropout(self.map(x)) + shift


def describe(difference: Difference) -> str:
    return f"{difference.kind} {difference.part} {difference.name}".strip()


WORDING = Wording("layer", describe, lambda error: [f"fails: {error}"], "elsewhere")


def compared(
    layer: nn.Module, change: Callable[..., Any], *, x: Tensor | None = None, whole: Any = None, **kwargs: Any
) -> list[str]:
    """What a check says of a layer whose results are changed."""
    x = torch.randn(2, LENGTH, 4) if x is None else x
    check = LayerCheck(layer, ((x,), kwargs), wording=WORDING, has_any=bool)
    error = check.run_whole(whole or (lambda args, kwargs: layer(*args, **kwargs)), inside=contextlib.nullcontext)
    if error is not None:
        raise error
    return check.run_split(lambda args, kwargs: change(layer(*args, **kwargs)))


def doubled_gradient(x: Tensor) -> Tensor:
    return 2 * x - x.detach()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda y: y, []),
        (lambda y: y * (1 + 1e-5), ["numbers hidden states"]),  # of which fp32 would show nothing
        (lambda y: y[:, 1:], ["shape hidden states"]),
        (lambda y: (y, y), ["number others"]),
        (doubled_gradient, ["numbers gradient hidden states"]),
        (lambda y: y.detach(), ["presence gradient hidden states"]),
        (lambda y: y.view(3), ["fails: shape '[3]' is invalid for input of size 128"]),
    ],
)
def test_what_differs(change: Callable[..., Any], found: list[str]) -> None:
    assert compared(Gated(), change) == found


def test_gradients_of_other_arguments() -> None:
    layer, shift = Gated(), torch.randn(4, requires_grad=True)

    def run(args: Any, kwargs: Any) -> Any:
        return layer(*args, shift=kwargs["shift"])

    assert compared(layer, lambda y: y, shift=shift) == []
    check = LayerCheck(layer, ((torch.randn(2, 3, 4),), {"shift": shift}), wording=WORDING, has_any=bool)
    check.run_whole(run, inside=contextlib.nullcontext)
    found = check.run_split(lambda args, kwargs: run(args, {"shift": doubled_gradient(kwargs["shift"])}))
    assert found == ["numbers gradient another argument"]
    assert shift.grad is None


def test_gradients_behind_a_gate_that_is_zero() -> None:
    layer = Gated()

    def whole(args: Any, kwargs: Any) -> Any:
        return layer(*args)

    def change(y: Tensor) -> Tensor:
        return y + layer.map.weight.sum() - layer.map.weight.sum().detach()

    assert compared(layer, change, whole=whole) == ["numbers gradient map.weight"]


def test_no_trace_is_left() -> None:
    layer = Gated()
    noted: list[Any] = []
    layer.map.register_forward_hook(lambda *_: noted.append(1))
    layer.map.register_full_backward_hook(lambda *_: noted.append(2))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    parameters, x = list(layer.parameters()), torch.randn(2, 3, 4)
    assert compared(layer, lambda y: y.add_(1).sub_(1), x=x) == []
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(now is then and now.grad is None for now, then in zip(layer.parameters(), parameters, strict=True))
    assert (layer.seen, noted, layer.training, layer.dropout.training) == ([], [], True, True)
    assert x.grad is None
    assert not x.requires_grad


def test_what_a_batch_has_no_numbers_for_is_not_compared() -> None:
    x = torch.randn(2, 3, 4)
    x[0] = torch.nan
    assert compared(Gated(), lambda y: y, x=x) == []
    assert compared(Gated(), lambda y: y + 1, x=x) == ["numbers hidden states"]
    assert compared(Gated(), doubled_gradient, x=x) == ["numbers gradient hidden states"]
    assert compared(Gated(), lambda y: y * torch.inf) == ["numbers hidden states"]


class InSinglesOnly(Gated):
    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("no kernel for fp64")
        return super().forward(x, shift=shift)


@pytest.mark.parametrize(("autocast", "found"), [(False, ["numbers gradient hidden states"]), (True, [])])
def test_a_layer_without_fp64(autocast: bool, found: list[str]) -> None:
    """The same difference is too small to be one where products are those of bf16."""

    def change(y: Tensor) -> Tensor:
        return y + 0.01 * (y - y.detach())

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        assert compared(InSinglesOnly(), change) == found
        assert compared(InSinglesOnly(), doubled_gradient) == ["numbers gradient hidden states"]


class WithoutBackward(Gated):
    """As a quantised layer's kernel is."""

    def forward(self, x: Tensor, *, shift: Tensor | float = 0.0) -> Tensor:
        if x.requires_grad:
            raise RuntimeError("no backward")
        return super().forward(x, shift=shift)


def test_a_layer_without_backward() -> None:
    with torch.no_grad():
        assert compared(WithoutBackward(), lambda y: y) == []
        assert compared(WithoutBackward(), lambda y: y + 1) == ["numbers hidden states"]
    with pytest.warns(UserWarning, match="layer is compared with itself by its results alone, .*no backward"):
        assert compared(WithoutBackward(), doubled_gradient) == []


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_sees_gradients(mode: Any) -> None:
    with mode():
        x = torch.randn(2, 3, 4)
        assert compared(Gated(), doubled_gradient, x=x) == ["numbers gradient hidden states"]
        assert not torch.is_grad_enabled()
        assert compared(Gated(), lambda y: y, x=x) == []


def test_an_error_of_the_layer_is_its_own() -> None:
    with pytest.raises(RuntimeError, match="normalized_shape"):
        compared(nn.LayerNorm(5), lambda y: y)


@pytest.mark.parametrize("failing", range(4))
def test_what_fails_elsewhere_is_not_gone_on_with(failing: int) -> None:
    """Flags of another rank, which fails at one of the points at which ranks agree."""
    asked: list[bool] = []

    def has_any(flag: bool) -> bool:
        asked.append(flag)
        return flag or len(asked) == failing + 1

    def run(args: Any, kwargs: Any) -> Any:
        return layer(*args)

    layer = Gated()
    check = LayerCheck(layer, ((torch.randn(2, 3, 4),), {}), wording=WORDING, has_any=has_any)
    assert check.run_whole(run, inside=contextlib.nullcontext) is None
    assert len(asked) == (2 if failing == 0 else 1)  # in another way
    assert check.run_split(run) == ([] if failing == 0 else ["elsewhere"])
    assert len(asked) == (5 if failing == 0 else failing + 1)
