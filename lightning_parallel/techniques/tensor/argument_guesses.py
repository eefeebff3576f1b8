"""What a layer may want beside hidden states, by the names of its arguments.

These are guesses, with which a layer only has to run: what is learned from such a run is compared with the layer itself
before training.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_BATCH, _LENGTH = 2, 4
HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_head", "n_heads", "heads", "nhead")
"""By which names modules say how many heads they have."""
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "d_k")


@dataclass(frozen=True)
class _Shapes:
    """Sizes to guess with: of hidden states, of further vectors, and of a head."""

    width: int
    vectors: Sequence[int]
    head_dim: int
    device: torch.device

    def states(self) -> list[Any]:
        """Of a second sequence, such as an encoder's."""
        return [self._zeros(_BATCH, _LENGTH, width) for width in dict.fromkeys((self.width, *self.vectors))]

    def vector(self) -> list[Any]:
        """One for each sample, such as what a diffusion model is conditioned on."""
        return [self._zeros(_BATCH, width) for width in dict.fromkeys((self.width, *self.vectors))]

    def table(self) -> list[Any]:
        """The cosines or the sines of positions."""
        return [self._ones(_LENGTH, size) for size in (self.head_dim, self.head_dim // 2)]

    def tables(self) -> list[Any]:
        """Both, or as one of complex numbers."""
        sizes = [size for part in (1, 2, 4) if (size := self.head_dim // part)]
        pairs = [(self._ones(1, _LENGTH, size), self._ones(1, _LENGTH, size)) for size in sizes]
        return [*pairs, *self.turns(), *self.table()]

    def turns(self) -> list[Any]:
        """Positions as complex numbers, of pairs of a head's dims."""
        return [torch.ones(_LENGTH, max(self.head_dim // 2, 1), dtype=torch.complex64, device=self.device)]

    def positions(self) -> list[Any]:
        """Of one sequence for all samples, or alone."""
        sizes = ((1, _LENGTH), (_LENGTH,))
        return [torch.zeros(size, dtype=torch.long, device=self.device) for size in sizes]

    def mask(self) -> list[Any]:
        """None, of a sequence, of each sample's, or of padding alone."""
        shapes = ((_LENGTH, _LENGTH), (_BATCH, _LENGTH, _LENGTH), (_BATCH, 1, _LENGTH, _LENGTH), (_BATCH, _LENGTH))
        return [None, *(self._ones(*shape) for shape in shapes)]

    def scalar(self) -> list[Any]:
        """One for all, such as a scale."""
        return [self._ones()]

    def number(self) -> list[Any]:
        """The first, such as a position to start from."""
        return [0]

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, requires_grad=True)


_KINDS: tuple[tuple[str, Callable[[_Shapes], list[Any]]], ...] = (
    (r"position_ids|positions?$|^pos$|input_pos|cache_position", _Shapes.positions),
    (r"cis|complex", _Shapes.turns),
    (r"cos|sin$", _Shapes.table),
    (r"rope|rotary|freqs|rot_|pos\w*_emb|position_emb", _Shapes.tables),
    (r"mask|bias|alibi|pad", _Shapes.mask),
    (r"memory|context|encoder|cross|src|source|kv|y$|ctx", _Shapes.states),
    (r"cond|emb|vec|time|style|ada|^[ct]$", _Shapes.vector),
    (r"scale|factor|alpha|beta|temperature|sigma", _Shapes.scalar),
    (r"start|offset|idx|index|number|step|layer", _Shapes.number),
)
"""What a name says, the surest first."""
_FILLED = (_Shapes.positions, _Shapes.turns, _Shapes.table, _Shapes.tables)
"""What a layer may need though its signature has a default of None for it."""


def guess_arguments(
    layer: nn.Module, width: int, vectors: Sequence[int], device: torch.device, *, limit: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Arguments with which `layer` may run, and those by name, the likeliest first.

    Args:
        layer: Its first argument is hidden states.
        width: Of hidden states `[2, 4, width]`.
        vectors: Other widths that its parameters have.
        device: Where the arguments are made.
        limit: About how many guesses; one that does not fit mostly fails in a layer's first lines.
    """
    parameters = list(inspect.signature(layer.forward).parameters.values())[1:]
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = [p.name for p in named if p.default is p.empty]
    useful = [p.name for p in named if p.default is None and _kind(p.name) in _FILLED]

    def states() -> Tensor:
        return torch.zeros(_BATCH, _LENGTH, width, device=device, requires_grad=True)

    yield [states()], dict.fromkeys(required)
    shapes = [_Shapes(width, vectors, size, device) for size in _head_dims(layer, width)]
    for names, shape in itertools.product([required, [*required, *useful]], shapes):
        for chosen in itertools.islice(_each_choice(names, shape, set(required)), limit // len(shapes)):
            yield [states()], chosen


def _each_choice(names: Sequence[str], shapes: _Shapes, required: set[str]) -> Iterator[dict[str, Any]]:
    """A value for each name: first those that the names say, then what else there is."""
    options = []
    for name in names:
        kind = _kind(name)
        said = [None, *shapes.scalar(), shapes.states()[0], shapes.vector()[0]] if kind is None else kind(shapes)
        others = [value for _, other in _KINDS if other is not kind for value in other(shapes)]
        options.append([*said, *others] if name in required else said)
    most = int(4000 ** (1 / max(len(options), 1)))
    likeliest = sorted(itertools.product(*(range(len(found))[:most] for found in options)), key=sum)
    for indices in likeliest:
        yield {name: found[index] for name, found, index in zip(names, options, indices, strict=True)}


def _kind(name: str) -> Callable[[_Shapes], list[Any]] | None:
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name.lower())), None)


def _head_dims(layer: nn.Module, width: int) -> list[int]:
    """How wide a head may be, by what modules say of it; else what divides hidden states."""
    sizes = [getattr(child, name, None) for child in layer.modules() for name in _HEAD_DIMS]
    counts = [getattr(child, name, None) for child in layer.modules() for name in HEAD_COUNTS]
    said = [*sizes, *(width // count for count in counts if isinstance(count, int) and count > 0)]
    found = list(dict.fromkeys(size for size in said if isinstance(size, int) and size > 1))
    return found or [width // n for n in (4, 8, 2, 16, 12, 32, 1) if width % n == 0 and width // n % 2 == 0]
