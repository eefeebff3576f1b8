"""Layers that take or make more than hidden states, as people write them: positions, masks, conditions, memories."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import seed_everything
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_parallel import ConfigurationError, build_strategy
from lightning_parallel.module.layer_stacks import find_layers
from lightning_parallel.techniques.tensor.plan import plan_tensor
from tests.data import batches
from tests.models.cases import LENGTH, VOCABULARY, Case, next_token_loss
from tests.parity import TOLERANCE, Outcome, make_trainer, once, train_module, worst

WIDTH, HEADS = 16, 4
HEAD = WIDTH // HEADS
SIZES = (LENGTH, 8, 12, LENGTH, 6)
"""Lengths of five steps."""


def angles(length: int) -> Tensor:
    """Of rotary positions, `[length, HEAD / 2]`."""
    return torch.outer(torch.arange(length).float(), 1e4 ** -(torch.arange(0, HEAD, 2).float() / HEAD))


def waves(length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, `[length, HEAD]`."""
    doubled = angles(length).repeat(1, 2)
    return doubled.cos(), doubled.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), -1) * sin.to(x.dtype)


class Plain(nn.Module):
    """Attention and a gated MLP, between which subclasses differ in what they are given."""

    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gate, self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def turn(self, x: Tensor) -> Tensor:
        return x

    def attend(self, x: Tensor, memory: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(2, (-1, HEAD)).transpose(1, 2)
        k, v = (m(memory).unflatten(2, (-1, HEAD)).transpose(1, 2) for m in (self.k, self.v))
        is_causal = self.is_causal and mask is None
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, attn_mask=mask, is_causal=is_causal)
        return self.out(y.transpose(1, 2).flatten(2))

    def mix(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))

    def whole(self, x: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor | None = None) -> Tensor:
        h = self.norm1(x)
        x = x + self.attend(h, h, turn, mask)
        return x + self.mix(self.norm2(x))


class Complex(Plain):
    def forward(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        turns = freqs_cis[: x.shape[1]]

        def turn(y: Tensor) -> Tensor:
            pairs = torch.view_as_complex(y.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turns).flatten(-2).to(y.dtype)

        return self.whole(x, turn)


class FromStart(Complex):
    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
        assert mask is None
        return super().forward(x, freqs_cis[start_pos : start_pos + x.shape[1]])


class Waves(Plain):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.whole(x, lambda y: turned(y, cos, sin))


class Pair(Plain):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return self.whole(x, lambda y: turned(y, *rope))


class Positions(Plain):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = (positions[..., None] * 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD)).repeat(1, 1, 2)[:, None]
        return self.whole(x, lambda y: turned(y, angle.cos(), angle.sin()))


class Masked(Plain):
    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        return self.whole(x, self.turn, attn_mask[:, None].bool())


class Conditioned(Plain):
    """As a diffusion model's layer is. A condition is as wide as the sequences are long."""

    is_causal = False

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 4 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate1, gate2 = self.shifts(c)[:, None].chunk(4, -1)
        h = self.norm1(x) * (1 + scale) + shift
        x = x + gate1 * self.attend(h, h, self.turn)
        return x + gate2 * self.mix(self.norm2(x))


class Remembering(Plain):
    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), memory, self.turn)
        return x + self.mix(self.norm2(x))

    is_causal = False


class ByName(Waves):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor, *, temb: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + self.time(temb)[:, None], cos, sin)


class Counting(Waves):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        positions = torch.arange(x.shape[1], device=x.device).float()
        angle = torch.outer(positions, 1e4 ** -(torch.arange(0, HEAD, 2) / HEAD)).repeat(1, 2)
        return super().forward(x, angle.cos(), angle.sin())


class Learned(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x + self.places(torch.arange(x.shape[1])), self.turn)


class Buffers(Waves):
    def __init__(self) -> None:
        super().__init__()
        for name, table in zip(("cos", "sin"), waves(2 * LENGTH), strict=True):
            self.register_buffer(name, table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]  # type: ignore[index]
        return super().forward(x, cos, sin)  # type: ignore[arg-type]


class Checkpointed(Buffers):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        found: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return found


class Kept(Counting):
    """Keeps its positions, as far as it has counted yet."""

    kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.kept is None or self.kept[0].shape[0] < x.shape[1]:
            doubled = torch.outer(torch.arange(x.shape[1]).float(), torch.ones(HEAD))
            self.kept = doubled.cos(), doubled.sin()
        return Waves.forward(self, x, *(table[: x.shape[1]] for table in self.kept))


class KeptAsBuffers(Buffers):
    """Makes its tables anew where they are too short, which they are at first."""

    def __init__(self) -> None:
        super().__init__()
        self.cos, self.sin = self.cos[:4].clone(), self.sin[:4].clone()  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        if self.cos.shape[0] < x.shape[1]:
            doubled = torch.outer(torch.arange(x.shape[1]).float(), torch.ones(HEAD))
            self.cos, self.sin = doubled.cos(), doubled.sin()
        return super().forward(x)


class FromTheFirst(Waves):
    """Takes the first hidden states, too, as each layer after it does."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Parameter(torch.tensor([0.9, 0.1]))

    def forward(self, x: Tensor, x0: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(self.parts[0] * x + self.parts[1] * x0, cos, sin)


class Biased(Plain):
    """The first layer makes a bias of relative positions, and each hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.Embedding(2 * LENGTH, HEADS)

    def forward(self, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if bias is None:
            positions = torch.arange(x.shape[1])
            bias = self.biases(positions[None] - positions[:, None] + LENGTH).permute(2, 0, 1)[None]
        return self.whole(x, self.turn, bias), bias


class MixedBehindAGate(Plain):
    """Mixes positions, which does not show as long as the gate is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.open = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x + self.open * x.cumsum(1) / LENGTH, self.turn)


class SoftBehindAGate(Plain):
    """A softmax over all features of a map, behind one that begins at zero: parts of features are no use to it."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.down.weight)

    def mix(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x, self.turn)


class Net(Case):
    """Three layers of a kind; `given` says what they take beside hidden states."""

    layer: type[nn.Module]
    sizes: Sequence[int] = (LENGTH,)

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.side = nn.Embedding(4, WIDTH)

    def given(self, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
        return ()

    def loss(self, tokens: Tensor) -> Tensor:
        tokens = tokens[:, : self.sizes[self.global_step % len(self.sizes)]]
        x = self.tokens(tokens)
        given = self.given(x, tokens)
        for layer in self.layers:
            x = layer(x, **given[0]) if given and isinstance(given[0], dict) else layer(x, *given)
        return next_token_loss(self.head(x), tokens)


class ConditionedToTheEnd(Net):
    """The condition is used behind the last layer, too."""

    layer = Conditioned

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.last = nn.Linear(WIDTH, WIDTH)

    def loss(self, tokens: Tensor) -> Tensor:
        x, c = self.tokens(tokens), self.side(tokens[:, 0] % 4)
        for layer in self.layers:
            x = layer(x, c)
        return next_token_loss(self.head(x * self.last(F.silu(c))[:, None]), tokens)


class HandingOn(Net):
    layer = Biased

    def loss(self, tokens: Tensor) -> Tensor:
        x, bias = self.tokens(tokens), None
        for layer in self.layers:
            x, bias = layer(x, bias)
        return next_token_loss(self.head(x), tokens)


class Decoder(Net):
    """The layers read what an encoder computes; only the decoder is cut."""

    layer = Remembering

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.encoder = nn.ModuleList(Buffers() for _ in range(2))

    def given(self, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
        memory = self.tokens(tokens.flip(1))
        for layer in self.encoder:
            memory = layer(memory)
        return (memory,)


class ChangesTheCondition(ConditionedToTheEnd):
    """Four layers; the last one is given what is computed between two layers of its stage."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers.append(Conditioned())

    def loss(self, tokens: Tensor) -> Tensor:
        x, c = self.tokens(tokens), self.side(tokens[:, 0] % 4)
        for index, layer in enumerate(self.layers):
            x = layer(x, c * (1 + index))
        return next_token_loss(self.head(x), tokens)


def net(kind: type[nn.Module], given: Callable[..., tuple[Any, ...]] | None = None, *, sizes: Any = None) -> type[Net]:
    return type(
        f"Net{kind.__name__}",
        (Net,),
        {"layer": kind, "given": given or Net.given, "sizes": sizes or Net.sizes, "__module__": __name__},
    )


def table(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (torch.polar(torch.ones(LENGTH, HEAD // 2), angles(LENGTH)),)


def from_start(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (0, torch.polar(torch.ones(40, HEAD // 2), angles(40)), None)


def both(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return waves(x.shape[1])


def pair(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (waves(x.shape[1]),)


def positions(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (torch.arange(x.shape[1]).expand(x.shape[0], -1),)


def causal(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (torch.ones(x.shape[1], x.shape[1]).tril().expand(x.shape[0], -1, -1),)


def condition(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (self.side(tokens[:, 0] % 4),)


def memory(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (self.side(tokens[:, :8] % 4),)


def first(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return (x, *waves(x.shape[1]))


def by_name(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    cos, sin = waves(x.shape[1])
    return ({"temb": tokens[:, :6] / VOCABULARY, "cos": cos, "sin": sin},)


CASES = {
    "complex": net(Complex, table, sizes=SIZES),  # a table that is first as long as the sequence, and then longer
    "from_start": net(FromStart, from_start),
    "waves": net(Waves, both, sizes=SIZES),
    "square_waves": net(Waves, both, sizes=(HEAD, LENGTH, HEAD, 8, HEAD)),  # as many positions as features of a head
    "pair": net(Pair, pair),
    "positions": net(Positions, positions),
    "masked": net(Masked, causal),
    "conditioned": net(Conditioned, condition),
    "remembering": net(Remembering, memory),
    "by_name": net(ByName, by_name),
    "from_the_first": net(FromTheFirst, first),
    "conditioned_to_the_end": ConditionedToTheEnd,
    "handing_on": HandingOn,
    "decoder": Decoder,
    "counting": net(Counting, sizes=SIZES),
    "learned": net(Learned, sizes=SIZES),
    "buffers": net(Buffers, sizes=SIZES),
    "checkpointed": net(Checkpointed),
    "soft_behind_a_gate": net(SoftBehindAGate),
}
FURTHER: dict[str, type[Case]] = {}
"""For one of the tests alone."""
REFUSED = {
    "kept": (net(Kept, sizes=SIZES), "changes what layers.0 (Kept) computes"),
    "kept_as_buffers": (net(KeptAsBuffers), "changes what layers.0 (KeptAsBuffers) computes"),
    "handing_on": (HandingOn, "changes what layers.0 (Biased) | takes no mask"),  # it counts distances in a part
    "mixed_behind_a_gate": (net(MixedBehindAGate), "changes what layers.0 (MixedBehindAGate) computes"),
}
globals().update({module.__name__: module for module in (*CASES.values(), *(kind for kind, _ in REFUSED.values()))})


def trained(name: str, strategy: str, num_ranks: int) -> Outcome:
    return train_module({**CASES, **FURTHER}[name], batches("byte_gpt", 1), strategy, num_ranks)


def expected(name: str) -> Outcome:
    """One process's numbers."""
    return once(trained, name, "auto", 1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("strategy", ["tp_custom", "cp_custom", "cp_custom:context_attention=ring", "pp_custom"])
def test_equal_to_one_process(ranks: Any, name: str, strategy: str) -> None:
    if "ring" in strategy and name == "masked":
        pytest.skip("a ring takes no mask: see the refusals in test_ring.py")
    if "cp_custom" in strategy and name == "handing_on":
        pytest.skip("refused, see below")
    if (name, strategy) == ("decoder", "pp_custom"):
        strategy = "pp_custom:layers=layers"
    assert worst(ranks(2).run(trained, name, strategy, 2)[0], expected(name)) < TOLERANCE


@pytest.mark.parametrize(
    "strategy", ["tp_custom:sequence=true", "cp_custom:recompute=full", "cp_custom:compile=layers"]
)
@pytest.mark.parametrize("name", ["waves", "counting", "buffers"])
def test_with_other_policies(ranks: Any, name: str, strategy: str) -> None:
    assert worst(ranks(2).run(trained, name, strategy, 2)[0], expected(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["complex", "conditioned", "learned"])
def test_with_tensor_and_context(ranks: Any, name: str) -> None:
    found = ranks(4).run(trained, name, "cp_custom:context=2,tensor=2", 4)[0]
    assert worst(found, expected(name)) < TOLERANCE


@pytest.mark.parametrize("name", ["conditioned_to_the_end", "from_the_first", "decoder"])
@pytest.mark.parametrize(
    ("strategy", "size"),
    [
        ("pp_custom:stages=time,recompute=full", 2),
        ("pp_custom:schedule=gpipe,stages=[1,2],compile=layers", 2),
        ("fsdp_custom:pipeline=2,tensor=2", 4),
        ("fsdp_custom:pipeline=2,context=2", 4),
    ],
)
def test_what_passes_beside_hidden_states(ranks: Any, name: str, strategy: str, size: int) -> None:
    strategy += ",layers=layers" if name == "decoder" else ""
    assert worst(ranks(size).run(trained, name, strategy, size)[0], expected(name)) < TOLERANCE


class Deep(ConditionedToTheEnd):
    """Four layers: a rank may have two stages, and hand on from one to the other."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers.append(Conditioned())


FURTHER["deep"] = Deep


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev", "interleaved,virtual_stages=2"])
def test_beside_hidden_states_of_several_stages_a_rank(ranks: Any, schedule: str) -> None:
    found = ranks(2).run(trained, "deep", f"pp_custom:schedule={schedule}", 2)[0]
    assert worst(found, expected("deep")) < TOLERANCE


def evaluated(strategy: str, num_ranks: int) -> float:
    seed_everything(3, verbose=False)
    trainer = make_trainer(strategy if strategy == "auto" else build_strategy(strategy), num_ranks)
    return float(trainer.validate(ConditionedToTheEnd(), batches("byte_gpt", 1), verbose=False)[0]["val_loss"])


def test_an_evaluation_before_training_passes_conditions(ranks: Any) -> None:
    found = ranks(2).run(evaluated, "pp_custom", 2)
    assert found == pytest.approx([evaluated("auto", 1)] * 2, abs=1e-5)


class Twelve(Net):
    """More layers than torch compiles versions of a function, and heads that are written into `forward`."""

    layer = Buffers

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(HardHeads() for _ in range(12))


class HardHeads(Buffers):
    def attend(self, x: Tensor, memory: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:2], HEADS, HEAD)
        q, k, v = (m(x).view(shape).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


FURTHER["twelve"] = Twelve


def compiled(strategy: str) -> Outcome:
    # Under tensor, each layer is compiled for itself.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit="tp_custom" not in strategy):
        return trained("twelve", f"{strategy}:compile=layers", 2)


@pytest.mark.parametrize("strategy", ["tp_custom", "cp_custom", "pp_custom"])
def test_a_deep_stack_is_compiled_once(ranks: Any, strategy: str) -> None:
    assert worst(ranks(2).run(compiled, strategy)[0], expected("twelve")) < TOLERANCE


class OnlyTheLast(ConditionedToTheEnd):
    """Of three stages, the one between is given no condition."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.layers = nn.ModuleList(MayBeConditioned() for _ in range(4))

    def loss(self, tokens: Tensor) -> Tensor:
        x, c = self.tokens(tokens), self.side(tokens[:, 0] % 4)
        for layer in list(self.layers)[:-1]:
            x = layer(x)
        return next_token_loss(self.head(self.layers[-1](x, c)), tokens)


class MayBeConditioned(Conditioned):
    def forward(self, x: Tensor, c: Tensor | None = None) -> Tensor:
        return super().forward(x, x.mean(1) if c is None else c)


class UsesTheMiddle(ConditionedToTheEnd):
    """The loss takes the hidden states with which the last stage begins."""

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        c = torch.ones(x.shape[0], WIDTH)
        for layer in self.layers:
            before, x = x, layer(x, c)
        return next_token_loss(self.head(x) + self.head(before), tokens)


class Complicated(ConditionedToTheEnd):
    """Layers take complex numbers that are computed with parameters."""

    layer = Complex

    def loss(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        turns = torch.polar(torch.ones(LENGTH, HEAD // 2), angles(LENGTH) * self.side.weight.mean())
        for layer in self.layers:
            x = layer(x, turns)
        return next_token_loss(self.head(x), tokens)


FURTHER["uses_the_middle"] = UsesTheMiddle


def test_the_loss_may_take_what_the_last_stage_has_received(ranks: Any) -> None:
    assert worst(ranks(2).run(trained, "uses_the_middle", "pp_custom", 2)[0], expected("uses_the_middle")) < TOLERANCE


def refused_pipeline(module: type[Case], strategy: str, num_ranks: int) -> str:
    try:
        train_module(module, batches("byte_gpt", 1), strategy, num_ranks)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("module", "strategy", "size", "words"),
    [
        (ChangesTheCondition, "pp_custom", 2, ["after layers.2, takes something that only another", "side.weight"]),
        (OnlyTheLast, "pp_custom", 4, ["that only another pipeline stage computes (with side.weight)", "every layer"]),
        (Complicated, "pp_custom", 2, ["layers.2 is given a tensor of torch.complex64 with 2 dimensions", "float32"]),
    ],
)
def test_what_does_not_pass_is_refused(
    ranks: Any, module: type[Case], strategy: str, size: int, words: list[str]
) -> None:
    message = ranks(size).run(refused_pipeline, module, strategy, size)[0]
    assert [word for word in words if word not in message] == [], message


class Picky(Waves):
    """Wants as many waves as it has positions, of a longer table, and says so by a ValueError."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.shape[0] not in (x.shape[1], 2 * LENGTH) or (cos.shape[0] == 2 * LENGTH and x.shape[1] != LENGTH):
            raise ValueError("as many waves as positions")
        return super().forward(x, cos[: x.shape[1]], sin[: x.shape[1]])


def long_waves(self: Net, x: Tensor, tokens: Tensor) -> tuple[Any, ...]:
    return waves(2 * LENGTH)


FURTHER["picky"] = net(Picky, long_waves)


def test_any_error_of_a_layer_on_a_part_lets_another_way_be_tried(ranks: Any) -> None:
    assert worst(ranks(2).run(trained, "picky", "cp_custom", 2)[0], expected("picky")) < TOLERANCE


def lengths_after_evaluations() -> list[int]:
    """What a rank has of the last of many batches, each of another length."""
    module = net(Counting, sizes=(LENGTH,))()
    tokens = torch.zeros(24, LENGTH, dtype=torch.long)
    seen: list[int] = []
    trainer = make_trainer(build_strategy("cp_custom"), 2)
    module.layers[-1].q.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    batches = [(tokens[:2, :n],) for n in range(5, LENGTH + 1)]
    trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)  # type: ignore[arg-type]
    return seen[-1:]


def test_lengths_of_an_evaluation_do_not_pile_up(ranks: Any) -> None:
    assert ranks(2).run(lengths_after_evaluations) == [[LENGTH // 2]] * 2


def refusal(name: str, attention: str) -> str:
    try:
        train_module(REFUSED[name][0], batches("byte_gpt", 1), f"cp_custom:context_attention={attention}", 2)
    except ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("attention", ["ulysses", "ring"])
@pytest.mark.parametrize("name", REFUSED)
def test_positions_that_a_part_cannot_know_are_refused(ranks: Any, name: str, attention: str) -> None:
    message = ranks(2).run(refusal, name, attention)[0]
    assert any(words in message for words in REFUSED[name][1].split(" | ")), message


class Unknowable(Plain):
    def forward(self, x: Tensor, settings: Any, other: Any, third: Any, fourth: Any) -> Tensor:
        return self.whole(x, settings.of.some.kind(other, third, fourth))


def test_a_layer_that_no_guess_fits_is_refused_soon() -> None:
    module = net(Unknowable)()
    start = time.monotonic()
    (violation,) = plan_tensor(module, find_layers(module), None, degree=2).violations
    assert time.monotonic() - start < 5
    assert violation.startswith("layers.0 (Unknowable) could not be run on hidden states, and what the names")
    assert "tensor_plan=" in violation
