"""Guesses at a layer's arguments beside hidden states, from their names.

A layer only has to run with them: a plan learned from such a run is checked against the layer itself before training.
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
"""Names of attributes in which modules keep their number of heads."""
_HEAD_DIMS = ("head_dim", "attention_head_size", "head_size", "dim_head", "d_head", "d_k")


@dataclass(frozen=True)
class _Shapes:
    """Sizes to guess with: width of hidden states, widths of further vectors, and width of a head.

    Each method returns candidates for one kind of argument, the likeliest first; `length` is 4, `batch` 2.
    """

    width: int
    vectors: Sequence[int]
    head_dim: int
    device: torch.device

    def states(self) -> list[Any]:
        """Hidden states of a second sequence, such as an encoder's: `[batch, length, width]`."""
        return [self._zeros(_BATCH, _LENGTH, width) for width in dict.fromkeys((self.width, *self.vectors))]

    def vector(self) -> list[Any]:
        """One vector for each sample, such as the condition of a diffusion model: `[batch, width]`."""
        return [self._zeros(_BATCH, width) for width in dict.fromkeys((self.width, *self.vectors))]

    def table(self) -> list[Any]:
        """Cosines or sines of positions: `[length, head_dim]`, or half as wide."""
        return [self._ones(_LENGTH, size) for size in (self.head_dim, self.head_dim // 2)]

    def tables(self) -> list[Any]:
        """Pairs of cosines and sines, `[1, length, head_dim]` or a part as wide, or one complex table."""
        sizes = [size for part in (1, 2, 4) if (size := self.head_dim // part)]
        pairs = [(self._ones(1, _LENGTH, size), self._ones(1, _LENGTH, size)) for size in sizes]
        return [*pairs, *self.rope_complex(), *self.table()]

    def rope_complex(self) -> list[Any]:
        """Rotary embeddings as complex numbers, one for each pair of a head's dimensions: `[length, head_dim / 2]`."""
        return [torch.ones(_LENGTH, max(self.head_dim // 2, 1), dtype=torch.complex64, device=self.device)]

    def positions(self) -> list[Any]:
        """Numbers of positions, `[1, length]` or `[length]`."""
        sizes = ((1, _LENGTH), (_LENGTH,))
        return [torch.zeros(size, dtype=torch.long, device=self.device) for size in sizes]

    def mask(self) -> list[Any]:
        """No mask, one for all samples, one for each sample (with or without heads), or one of padding."""
        shapes = ((_LENGTH, _LENGTH), (_BATCH, _LENGTH, _LENGTH), (_BATCH, 1, _LENGTH, _LENGTH), (_BATCH, _LENGTH))
        return [None, *(self._ones(*shape) for shape in shapes)]

    def scalar(self) -> list[Any]:
        """A tensor without dimensions, such as a scale."""
        return [self._ones()]

    def number(self) -> list[Any]:
        """A Python number, such as a position to start from."""
        return [0]

    def _ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.device)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, requires_grad=True)


_KINDS: tuple[tuple[str, Callable[[_Shapes], list[Any]]], ...] = (
    (r"position_ids|positions?$|^pos$|input_pos|cache_position", _Shapes.positions),
    (r"cis|complex", _Shapes.rope_complex),
    (r"cos|sin$", _Shapes.table),
    (r"rope|rotary|freqs|rot_|pos\w*_emb|position_emb", _Shapes.tables),
    (r"mask|bias|alibi|pad", _Shapes.mask),
    (r"memory|context|encoder|cross|src|source|kv|y$|ctx", _Shapes.states),
    (r"cond|emb|vec|time|style|ada|^[ct]$", _Shapes.vector),
    (r"scale|factor|alpha|beta|temperature|sigma", _Shapes.scalar),
    (r"start|offset|idx|index|number|step|layer", _Shapes.number),
)
"""Patterns of names and the kinds that they suggest, the surest first."""
_FILLED = (_Shapes.positions, _Shapes.rope_complex, _Shapes.table, _Shapes.tables)
"""Kinds that a layer may need though its signature has ``None`` as their default."""


def guess_arguments(
    layer: nn.Module, width: int, vectors: Sequence[int], device: torch.device, *, limit: int
) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Guess the arguments of `layer`, the likeliest first.

    Args:
        layer: A layer whose first argument is hidden states.
        width: Of hidden states, which are `[2, 4, width]`.
        vectors: Other widths that its parameters have.
        device: The device of the arguments.
        limit: The approximate number of guesses; a wrong one usually fails in the layer's first lines.

    Returns:
        Arguments by position, and arguments by name.
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
    """Choose a value for each name: first values that the names suggest, then all others."""
    options = []
    for name in names:
        kind = _kind(name)
        said = [None, *shapes.scalar(), shapes.states()[0], shapes.vector()[0]] if kind is None else kind(shapes)
        others = [value for _, other in _KINDS if other is not kind for value in other(shapes)]
        options.append([*said, *others] if name in required else said)
    # Few options for each name where there are many names, so that there are never more than 4000 combinations.
    most = int(4000 ** (1 / max(len(options), 1)))
    likeliest = sorted(itertools.product(*(range(len(found))[:most] for found in options)), key=sum)
    for indices in likeliest:
        yield {name: found[index] for name, found, index in zip(names, options, indices, strict=True)}


def _kind(name: str) -> Callable[[_Shapes], list[Any]] | None:
    return next((kind for pattern, kind in _KINDS if re.search(pattern, name.lower())), None)


def _head_dims(layer: nn.Module, width: int) -> list[int]:
    """Guess the width of a head, from attributes of modules; else from divisors of the width of hidden states."""
    sizes = [getattr(child, name, None) for child in layer.modules() for name in _HEAD_DIMS]
    counts = [getattr(child, name, None) for child in layer.modules() for name in HEAD_COUNTS]
    said = [*sizes, *(width // count for count in counts if isinstance(count, int) and count > 0)]
    found = list(dict.fromkeys(size for size in said if isinstance(size, int) and size > 1))
    return found or [width // n for n in (4, 8, 2, 16, 12, 32, 1) if width % n == 0 and width // n % 2 == 0]
