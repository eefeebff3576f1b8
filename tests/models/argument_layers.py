"""Layers that take or make more than hidden states, as people write them: positions, masks, conditions, memories."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models.cases import LENGTH

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


class HiddenByName(Waves):
    """Hidden states are given by name, and are not the first of its arguments."""

    def forward(self, scale: float, hidden: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden * scale, cos, sin)


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


class MayBeConditioned(Conditioned):
    def forward(self, x: Tensor, c: Tensor | None = None) -> Tensor:
        return super().forward(x, x.mean(1) if c is None else c)


class Picky(Waves):
    """Wants as many waves as it has positions, of a longer table, and says so by a ValueError."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if cos.shape[0] not in (x.shape[1], 2 * LENGTH) or (cos.shape[0] == 2 * LENGTH and x.shape[1] != LENGTH):
            raise ValueError("as many waves as positions")
        return super().forward(x, cos[: x.shape[1]], sin[: x.shape[1]])


class HardHeads(Buffers):
    def attend(self, x: Tensor, memory: Tensor, turn: Callable[[Tensor], Tensor], mask: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:2], HEADS, HEAD)
        q, k, v = (m(x).view(shape).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))
