"""Which linear maps are split how: plans from the user, from the model, and from what flows through a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.techniques.tensor.plan import TensorPlan, plan_tensor
from lightning_parallel.techniques.tensor.trace import LayerTrace, trace_layer
from tests.models.cases import Attention, Block, LoRA
from tests.models.layered import HardBlock, Scaled
from tests.models.tables import TENSOR_MODULES

COLUMNS, ROWS = "colwise", "rowwise"


class Stacked(nn.Module):
    """Two layers of a kind."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(2))


def plan(make: Callable[[], nn.Module], given: dict[str, str] | None = None, degree: int = 2) -> TensorPlan:
    module = Stacked(make)
    return plan_tensor(module, find_layers(module), given, degree=degree)


def roles(make: Callable[[], nn.Module], given: dict[str, str] | None = None, degree: int = 2) -> dict[str, str]:
    """The plan in the first layer, which is also that in the second."""
    found = plan(make, given, degree)
    assert found.violations == []
    assert found.below("layers.0") == found.below("layers.1")
    return found.below("layers.0")


class Gated(nn.Module):
    """As in Llama: two maps up, one down."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class FusedGate(Gated):
    """The gate and what it gates in one map."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 64)
        del self.up

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = Attention(16, 2), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(self.norm(x + self.attention(x))))


class SideBySide(PostNorm):
    """Attention and MLP read the same hidden states, and their results are added in one go."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.attention(y) + self.mlp(y)


class OneMapOut(nn.Module):
    """One map for queries, keys, values and MLP, and one map out (Dehghani et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16 * 3 + 64), nn.Linear(16 + 64, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, inner = self.first(x).split([16, 16, 16, 64], -1)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.last(torch.cat([y, F.gelu(inner)], -1))


class Routed(nn.Module):
    """Every expert computes all tokens; the router reads hidden states and closes no branch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.experts = nn.ModuleList(Gated() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        return x + sum(shares[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class ThreeInARow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.c(F.gelu(self.b(F.gelu(self.a(x)))))


class Mixing(nn.Module):
    """Hidden states reach the second map by another way, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x))


def with_conv1d() -> nn.Module:
    from transformers.pytorch_utils import Conv1D

    return nn.Sequential(Conv1D(64, 16), nn.GELU(), Conv1D(16, 64))


def with_lora() -> nn.Module:
    block = Block()
    block.attention.qkv, block.attention.out = LoRA(block.attention.qkv), LoRA(block.attention.out)
    return block


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)


def decoder_layer() -> nn.Module:
    return nn.TransformerDecoderLayer(16, 4, 32, batch_first=True)


MLP = {"mlp.0": COLUMNS, "mlp.2": ROWS}
FEED_FORWARD = {"linear1": COLUMNS, "linear2": ROWS}
FUSED = {"attention.qkv": COLUMNS, "attention.out": ROWS}
GATED = {"gate": COLUMNS, "up": COLUMNS, "down": ROWS}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (HardBlock, {**dict.fromkeys("qkv", COLUMNS), "o": ROWS, "up": COLUMNS, "down": ROWS}),
        (Block, {**FUSED, **MLP}),
        (PostNorm, {**FUSED, **MLP}),
        (SideBySide, {**FUSED, **MLP}),
        (OneMapOut, {"first": COLUMNS, "last": ROWS}),
        (Gated, GATED),
        (FusedGate, {"gate": COLUMNS, "down": ROWS}),
        (encoder_layer, {"self_attn": "heads", **FEED_FORWARD}),
        (decoder_layer, {"self_attn": "heads", "multihead_attn": "heads", **FEED_FORWARD}),
        (with_conv1d, {"0": COLUMNS, "2": ROWS}),
        (Routed, {f"experts.{i}.{name}": role for i in range(2) for name, role in GATED.items()}),
    ],
)
def test_inferred(make: Callable[[], nn.Module], expected: dict[str, str]) -> None:
    assert roles(make) == expected
    assert plan(make).source == "what flows from map to map in a layer"


def test_the_last_pair_of_three_maps_in_a_row() -> None:
    """Each closing map needs maps that read hidden states, and there is one such map."""
    assert roles(ThreeInARow) == {"a": COLUMNS, "b": ROWS}


def test_low_rank_factors_are_no_maps() -> None:
    """A frozen map with factors beside it is split where what it makes goes on alone."""
    found = roles(with_lora)
    assert {name: role for name, role in found.items() if name.startswith("mlp")} == MLP
    assert all("down" not in name.rpartition(".")[2] for name in found)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (Mixing, "layers.0.b [16, 16] of Mixing reads hidden states, and no map reads what it makes of them alone"),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()), "no branch of linear maps was found"),
        (lambda: nn.Sequential(nn.Linear(16, 32), Scaled(32, 16)), "layers.0.1 [16, 32] of Sequential is a Scaled, wh"),
        (lambda: nn.Sequential(Scaled(32, 16)), "no linear maps of torch's own kinds; 0 is a Scaled, which computes"),
    ],
)
def test_left_whole(make: Callable[[], nn.Module], words: str) -> None:
    found = plan(make)
    assert found.roles == {}
    assert words in found.violations[0]


def test_attention_with_learned_keys_stays_whole() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True, add_bias_kv=True)
            self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(self.attention(x, x, x)[0])

    assert all(not name.startswith("attention") for name in roles(Layer))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"up": COLUMNS, "down": ROWS}, {"up": COLUMNS, "down": ROWS}),
        ({"layers.*.q": COLUMNS}, {"q": COLUMNS}),
        ({"up": COLUMNS, "down": "replicate"}, {"up": COLUMNS}),
        ({"*": "replicate", "up": COLUMNS}, {"up": COLUMNS}),
    ],
)
def test_given(given: dict[str, str], expected: dict[str, str]) -> None:
    """A pattern is the end of a path, ``*`` is one name, and what comes later holds."""
    assert roles(HardBlock, given) == expected
    assert plan(HardBlock, given).source == "tensor_plan"


def test_given_for_one_layer() -> None:
    found = plan(HardBlock, {"layers.1.up": COLUMNS})
    assert found.roles == {"layers.1.up": COLUMNS}


def test_given_for_an_attention_module() -> None:
    assert roles(encoder_layer, {"self_attn": COLUMNS}) == {"self_attn": "heads"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"uup": COLUMNS}, ["'uup' names no linear map", "there are up"]),
        ({"norm1": COLUMNS}, ["'norm1' names no linear map"]),
        ({"up": "columnwise"}, ["'columnwise' for 'up' is unknown", "colwise, rowwise, replicate"]),
        ({"*": "replicate"}, ["no branch of linear maps"]),
    ],
)
def test_given_wrongly(given: dict[str, str], words: list[str]) -> None:
    violations = "\n".join(plan(HardBlock, given).violations)
    assert [word for word in words if word not in violations] == [], violations


def of_case(name: str, degree: int, given: dict[str, str] | None = None) -> TensorPlan:
    module = TENSOR_MODULES[name]()
    return plan_tensor(module, find_layers(module), given, degree=degree)


def test_from_the_model() -> None:
    found = of_case("llama", 2)
    assert found.source == "the model's own _tp_plan"
    names = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"}
    assert found.below("model.model.layers.1") == {
        **dict.fromkeys(names, COLUMNS),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), ROWS),
    }
    assert len(found.roles) == 3 * 7


def test_the_users_plan_comes_before_the_models() -> None:
    found = of_case("llama", 2, {"up_proj": COLUMNS})
    assert set(found.below("model.model.layers.0")) == {"mlp.up_proj"}


def test_too_few_heads_of_keys_and_values_stay_whole() -> None:
    found = of_case("llama", 4).below("model.model.layers.0")
    assert "self_attn.q_proj" in found
    assert not {"self_attn.k_proj", "self_attn.v_proj"} & set(found)


def test_experts_stay_whole() -> None:
    found = of_case("mixtral", 2).below("model.model.layers.0")
    assert set(found) == {f"self_attn.{name}_proj" for name in "qkvo"}


@pytest.mark.parametrize(
    ("make", "degree", "words"),
    [
        (Block, 4, "layers.0: tensor=4 cannot share 2 heads; possible: 1, 2"),
        (encoder_layer, 3, "cannot share 4 heads; possible: 1, 2, 4"),
        (Gated, 3, "tensor=3 does not divide the 32 outputs of layers.0.gate; possible: 1, 2, 4, 8, 16, 32"),
    ],
)
def test_what_does_not_divide(make: Callable[[], nn.Module], degree: int, words: str) -> None:
    assert words in "\n".join(plan(make, degree=degree).violations)


def test_an_unknown_number_of_ranks_refuses_nothing() -> None:
    module = Stacked(Block)
    assert plan_tensor(module, find_layers(module), None, degree="node").violations == []


def test_a_trace_changes_nothing() -> None:
    torch.manual_seed(3)
    layer = encoder_layer()
    before, state = {n: p.clone() for n, p in layer.state_dict().items()}, torch.get_rng_state()
    trace = trace_layer(layer)
    assert isinstance(trace, LayerTrace)
    assert trace.failures == []
    assert all(torch.equal(before[name], value) for name, value in layer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not layer.linear1._forward_hooks


def test_a_layer_that_cannot_be_run() -> None:
    class Needs(Gated):
        def forward(self, x: Tensor, settings: Any) -> Tensor:
            return super().forward(x) * settings.scale

    found = plan(Needs)
    assert found.violations == []
    assert [each.layers for each in found.unseen] == [("layers.0", "layers.1")]
    assert found.unseen[0].reason.startswith("layers.0 (Needs) could not be run on hidden states")
