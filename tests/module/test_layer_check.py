"""The check of a split layer: results, what it keeps, and gradients, of which it leaves no trace."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_parallel import ConfigurationError, build_strategy, full_state_dict
from lightning_parallel.module.layer_check import Difference, LayerCheck, Wording
from tests.data import loader_of
from tests.models.cases import VOCABULARY, Block, Case, next_token_loss
from tests.parity import TOLERANCE, difference, make_trainer

WIDTH = 16

# Over ranks: right results, wrong gradients ---------------------------------------------------------------------------


class _DividedByLength(torch.autograd.Function):
    """The identity, which divides its gradient by the length of a sequence: on a rank, by the length of its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, length: int) -> Tensor:
        ctx.length = length
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] / ctx.length, None


class _DividedByWidth(torch.autograd.Function):
    """The same with the number of features, as a kernel sees it, which is given those of its rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient / (gradient.to_local() if isinstance(gradient, DTensor) else gradient).shape[-1]


def divided(x: Tensor, length: int) -> Tensor:
    return _DividedByLength.apply(x, length)  # type: ignore[no-any-return]


class OfHidden(Block):
    def forward(self, x: Tensor) -> Tensor:
        return divided(super().forward(x), x.shape[1])


class OfParameter(Block):
    """The gradient of hidden states is right."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * divided(self.scale, x.shape[1]))


class OfArgument(Block):
    """It is given a vector for each sample, which is as wide as the sequence is long."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * (1 + divided(condition, x.shape[1])[:, None]))


class OfSecond(Block):
    """Only the second layer is wrong."""

    is_wrong = False

    def forward(self, x: Tensor) -> Tensor:
        return divided(super().forward(x), x.shape[1]) if self.is_wrong else super().forward(x)


class Keeps(Block):
    """It keeps a loss of its own, of means over positions."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.balance = x.softmax(-1).mean((0, 1)).square().sum()
        return x


class WrittenInto(Block):
    """It writes into what it is given, as code that saves memory does."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attention(self.norm1(x))
        return divided(x + self.mlp(self.norm2(x)), x.shape[1])


class Checkpointed(OfHidden):
    """It computes its activations again, in the way that does not work with `torch.autograd.grad`."""

    def forward(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore"):  # in evaluation, no input needs a gradient
            return checkpoint(super().forward, x, use_reentrant=True)  # type: ignore[no-any-return]


class OfFeatures(Block):
    """It divides the gradient of the features between its linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp.insert(2, _Dividing())


class GatedInside(Block):
    """It multiplies features between its linear maps by a number of each sample that it is given."""

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:  # type: ignore[override]
        x = x + self.attention(self.norm1(x))
        features = self.mlp[0](self.norm2(x)) * condition[:, None, :1]
        return x + self.mlp[2](self.mlp[1](features))  # type: ignore[no-any-return]


class _Dividing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _DividedByWidth.apply(x)  # type: ignore[no-any-return]


LAYERS = {
    kind.__name__: kind
    for kind in (OfHidden, OfParameter, OfArgument, OfSecond, Keeps, WrittenInto, Checkpointed, OfFeatures, GatedInside)
}


class Net(Case):
    """Two layers of a kind."""

    def __init__(self, layer: str) -> None:
        super().__init__()
        self.tokens, self.side = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LAYERS[layer]() for _ in range(2))
        self.layers[1].is_wrong = True
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        given = (self.side(tokens[:, 0]),) if isinstance(self.layers[0], OfArgument | GatedInside) else ()
        for layer in self.layers:
            x = layer(x, *given)
        return next_token_loss(self.head(x), tokens)


def refusal(name: str, strategy: str, sanity_steps: int) -> str:
    try:
        trainer = make_trainer(build_strategy(strategy), 2, num_sanity_val_steps=sanity_steps)
        loader = loader_of("byte_gpt", steps=2, global_batch=4, num_ranks=1)
        trainer.fit(Net(name), loader, loader)
    except ConfigurationError as error:
        return f"{trainer.global_step} steps: {error}"
    return ""


@pytest.mark.parametrize("sanity_steps", [0, 1])
@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OfHidden", "the gradient of hidden states that layers.0 (OfHidden) computes, but not its result: by "),
        ("OfParameter", "the gradient of scale that layers.0 (OfParameter) computes, but not its result: by "),
        ("OfArgument", "the gradient of another argument that layers.0 (OfArgument) computes"),
        ("OfSecond", "the gradient of hidden states that layers.1 (OfSecond) computes"),
        ("WrittenInto", "the gradient of hidden states that layers.0 (WrittenInto) computes"),
        ("Checkpointed", "the gradient of hidden states that layers.0 (Checkpointed) computes"),
        ("Keeps", "layers.0 (Keeps) keeps a tensor () beside hidden states"),
    ],
)
def test_context_refuses_a_wrong_gradient(ranks: Any, name: str, words: str, attention: str, sanity_steps: int) -> None:
    for message in ranks(2).run(refusal, name, f"cp_custom:context_attention={attention}", sanity_steps):
        assert message.startswith("0 steps: "), message
        assert words in message
        assert "context=1" in message


@pytest.mark.parametrize("strategy", ["cp_custom:recompute=full", "cp_custom:compile=layers"])
def test_context_refuses_it_under_other_policies(ranks: Any, strategy: str) -> None:
    assert "changes the gradient of hidden states" in ranks(2).run(refusal, "OfHidden", strategy, 0)[0]


@pytest.mark.parametrize("strategy", ["tp_custom", "tp_custom:sequence=true"])
def test_tensor_refuses_a_wrong_gradient(ranks: Any, strategy: str) -> None:
    for message in ranks(2).run(refusal, "OfFeatures", strategy, 0):
        assert message.startswith("0 steps: "), message
        assert "layers.0 (OfFeatures) computes something else when its linear maps are split" in message
        assert "the gradient of " in message
        assert "tensor=1" in message


def trained(strategy: str, num_ranks: int, sanity_steps: int) -> dict[str, Tensor]:
    L.seed_everything(3, verbose=False)
    built = strategy if strategy == "auto" else build_strategy(strategy)
    trainer = make_trainer(built, num_ranks, num_sanity_val_steps=sanity_steps)
    loader = loader_of("byte_gpt", steps=3, global_batch=4, num_ranks=1)
    trainer.fit(Net("GatedInside"), loader, loader)
    return full_state_dict(trainer)


@pytest.mark.parametrize("sanity_steps", [0, 1])
def test_tensor_sees_gradients_that_an_evaluation_does_not_show(ranks: Any, sanity_steps: int) -> None:
    """Of the two ways to run this layer, one has a part of a gradient; only training shows that there is one."""
    assert difference(ranks(2).run(trained, "tp_custom", 2, sanity_steps)[0], trained("auto", 1, 0)) < TOLERANCE


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
        self.latest = self._latest = x.detach()  # in fp64, while it is compared
        self.seen.append(len(x))
        return x + self.gate * self.dropout(self.map(x)) + shift


def describe(difference: Difference) -> str:
    return f"{difference.kind} {difference.part} {difference.name}".strip()


WORDING = Wording("layer", describe, lambda error: [f"fails: {error}"], "elsewhere", lambda place: f"apart at {place}")


def compared(
    layer: nn.Module, change: Callable[..., Any], *, x: Tensor | None = None, whole: Any = None, **kwargs: Any
) -> list[str]:
    """What a check says of a layer whose results are changed."""
    x = torch.randn(2, 16, 4) if x is None else x
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
    forwards: list[int] = []
    backwards: list[int] = []
    layer.map.register_forward_hook(lambda *_: forwards.append(1))
    layer.map.register_full_backward_hook(lambda *_: backwards.append(1))
    attributes = dict(vars(layer))
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    parameters, x = list(layer.parameters()), torch.randn(2, 3, 4)
    assert compared(layer, lambda y: y.add_(1).sub_(1), x=x) == []
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(now is then and now.grad is None for now, then in zip(layer.parameters(), parameters, strict=True))
    assert (layer.seen, forwards, backwards, layer.training, layer.dropout.training) == ([], [], [], True, True)
    assert vars(layer) == attributes
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
