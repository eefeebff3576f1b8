"""Which of a layer's arguments and tables are cut with its sequence.

The usual rule goes by sizes: what is as long as the sequence is cut. Where a layer then computes something else than on
the whole, other rules are tried; none is taken that was not seen to be right.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.context.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """What differs from the usual rule.

    Args:
        tables: Arguments that are longer than the sequence are cut, too: a layer takes a row for each position.
        vectors: Numbers of each sample, with fewer dims than hidden states, are whole.
        rows: Where several dims are as long as the sequence, the first is cut.
        buffers: Buffers of the layer that are as long as the sequence, or longer, are cut.
        counts: What the layer counts by `torch.arange`, up to its length, are the positions of the part.
    """

    tables: bool = False
    vectors: bool = False
    rows: bool = False
    buffers: bool = False
    counts: bool = False


USUAL = CutRule()


def candidate_rules(first: CutRule) -> Iterator[CutRule]:
    """All with up to two differences, `first` and the usual one before the others."""
    differences = [each.name for each in fields(CutRule)]
    chosen = [names for count in (0, 1, 2) for names in itertools.combinations(differences, count)]
    return iter(dict.fromkeys([first, *(CutRule(**dict.fromkeys(names, True)) for names in chosen)]))


def relations(arguments: Any, length: int) -> tuple[Any, ...]:
    """How sizes compare with `length`: of two steps with equal ones, the same rule is right."""
    return tuple(
        tuple((size > length) - (size < length) for size in leaf.shape)
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, Tensor)
    )


def cut_argument(name: str, value: Any, *, rule: CutRule, sequences: Sequences, length: int, hidden: Tensor) -> Any:
    """Split what runs along the sequence: positions, rotary tables, a second sequence. Masks stay whole.

    Args:
        name: By which the layer is given it, or the argument that holds it; empty where it is given by place.
        value: Whole on every rank.
        rule: How.
        sequences: The ranks.
        length: Of the whole sequence.
        hidden: This rank's part of hidden states.
    """
    if not isinstance(value, Tensor):
        return value
    if ("mask" in name and "padding" not in name) or (rule.vectors and _is_of_samples(value, hidden, sequences.dim)):
        dims = []
    elif value.ndim == hidden.ndim and value.shape[-1] == hidden.shape[-1] and value.is_floating_point():
        other = value.shape[sequences.dim]
        if other != length and other == hidden.shape[sequences.dim]:
            return value  # what an earlier layer returned: a part already
        dims = [sequences.dim]  # another sequence of hidden states, such as an encoder's
    else:
        dims = [dim for dim, size in enumerate(value.shape) if size == length]
        if sequences.dim in dims and not rule.rows:  # another size may happen to be the length
            dims = [sequences.dim]
        if rule.tables and not dims:
            return _rows(value, sequences, length)
    if len(dims) == 1 or (dims and rule.rows):
        return sequences.cut(value, dims[0])
    return sequences.share(value)


def _is_of_samples(value: Tensor, hidden: Tensor, dim: int) -> bool:
    is_smaller = value.is_floating_point() and 0 < value.ndim < hidden.ndim
    return is_smaller and value.shape[0] == hidden.shape[1 - dim]


def _rows(table: Tensor, sequences: Sequences, length: int) -> Tensor:
    """This part's rows of a table that is as long as the sequence, or longer; `table` itself where it is shorter."""
    dim = next((dim for dim, size in enumerate(table.shape) if size >= length), None)
    if dim is None:
        return sequences.share(table)
    return sequences.cut(table.narrow(dim, 0, length), dim)


@dataclass
class PartOfTables:
    """Inside this context, buffers of a layer have the rows of a part.

    Args:
        layer: The layer.
        sequences: The ranks.
        length: Of the whole sequence.
    """

    layer: nn.Module
    sequences: Sequences
    length: int
    _swapped: list[tuple[dict[str, Any], str, Tensor, Tensor]] = field(default_factory=list)

    def enter(self) -> None:
        """Put parts in the place of buffers."""
        for child in self.layer.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and (part := _rows(buffer, self.sequences, self.length)) is not buffer:
                    self._swapped.append((child._buffers, name, buffer, part))
                    child._buffers[name] = part

    def leave(self) -> None:
        """Put the buffers back, but for those that the layer has made anew."""
        for buffers, name, whole, part in self._swapped:
            if buffers.get(name) is part:
                buffers[name] = whole
        self._swapped.clear()


def is_count_of_part(sequences: Sequences, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether these arguments of `torch.arange` count what is as long as a part, from 0 on."""
    *bounds, end = _bounds(args, kwargs)
    return bounds in ([], [0]) and isinstance(end, int) and sequences.is_part(end)


def positions_of_part(sequences: Sequences, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """The positions of the part that these arguments of `torch.arange` count."""
    rest = {name: value for name, value in kwargs.items() if name not in _BOUNDS}
    return sequences.cut(torch.arange(sequences.whole_length(_bounds(args, kwargs)[-1]), **rest), 0)


_BOUNDS = ("start", "end", "step")


def _bounds(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *(kwargs[name] for name in _BOUNDS if name in kwargs)]
