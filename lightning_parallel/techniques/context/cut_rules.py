"""Rules that say which of a layer's arguments and buffers are split along with its sequence.

The usual rule goes by sizes: tensors as long as the sequence are split. Where the layer then computes something else
than on whole sequences, other rules are tried. A rule is only used after a comparison has shown that it is right.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_parallel.techniques.context.sequences import Sequences


@dataclass(frozen=True, kw_only=True)
class CutRule:
    """Differences from the usual rule.

    Args:
        tables: Arguments longer than the sequence are split, too: tables with a row for each position.
        vectors: Per-sample tensors, with fewer dimensions than hidden states, are not split.
        rows: Where several dimensions are as long as the sequence, the first is split.
        buffers: Buffers of the layer that are as long as the sequence, or longer, are split.
        counts: Positions that the layer makes with `torch.arange`, up to its length, are those of the part.
        pairs: They are those of the whole, and what the layer makes for pairs of positions (the relative bias of T5) is
            of whole sequences, as masks are: `torch.zeros`, views, and arguments with more dimensions than hidden
            states.
    """

    tables: bool = False
    vectors: bool = False
    rows: bool = False
    buffers: bool = False
    counts: bool = False
    pairs: bool = False


USUAL = CutRule()


def candidate_rules(first: CutRule) -> Iterator[CutRule]:
    """List all rules with up to two differences, beginning with `first` and the usual rule."""
    differences = [each.name for each in fields(CutRule)]
    chosen = [names for count in (0, 1, 2) for names in itertools.combinations(differences, count)]
    return iter(dict.fromkeys([first, *(CutRule(**dict.fromkeys(names, True)) for names in chosen)]))


def relations(arguments: Any, length: int) -> tuple[Any, ...]:
    """Compare the sizes of all tensors with `length`; the same rule is right for two steps with equal results.

    Args:
        arguments: Of a layer, in nested containers.
        length: Of the whole sequence, in positions.

    Returns:
        For each tensor and dimension, -1, 0 or 1: shorter, as long, or longer.
    """
    return tuple(
        tuple((size > length) - (size < length) for size in leaf.shape)
        for leaf in tree_leaves(arguments)
        if isinstance(leaf, Tensor)
    )


def cut_argument(name: str, value: Any, *, rule: CutRule, sequences: Sequences, length: int, hidden: Tensor) -> Any:
    """Split an argument along the sequence: positions, rotary tables, a second sequence. Masks stay whole.

    Args:
        name: The argument's name, or that of the container it is in; empty if it is given by position.
        value: The argument, whole on every rank; anything but a tensor is returned as it is.
        rule: The rule.
        sequences: The ranks.
        length: Of the whole sequence, in positions.
        hidden: This rank's part of hidden states, `[batch, part, width]`.

    Returns:
        This rank's part, or the whole tensor with the gradient that whole tensors need.
    """
    if not isinstance(value, Tensor):
        return value
    if rule.pairs and value.ndim > hidden.ndim:
        return sequences.share(value)
    if ("mask" in name and "padding" not in name) or (rule.vectors and _is_of_samples(value, hidden, sequences.dim)):
        dims = []
    elif value.ndim == hidden.ndim and value.shape[-1] == hidden.shape[-1] and value.is_floating_point():
        other = value.shape[sequences.dim]
        if other != length and other == hidden.shape[sequences.dim]:
            return value  # returned by an earlier layer, so it is a part already
        dims = [sequences.dim]  # a second sequence of hidden states, such as an encoder's
    else:
        dims = [dim for dim, size in enumerate(value.shape) if size == length]
        # Another dimension, such as heads or width, may happen to be as long as the sequence.
        if sequences.dim in dims and not rule.rows:
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
    """Take this part's rows of a table that is as long as the sequence, or longer; a shorter table stays whole."""
    dim = next((dim for dim, size in enumerate(table.shape) if size >= length), None)
    if dim is None:
        return sequences.share(table)
    return sequences.cut(table.narrow(dim, 0, length), dim)


@dataclass
class PartOfTables:
    """Buffers of a layer that are replaced by the rows of this rank's part, between `enter` and `leave`.

    Args:
        layer: The layer.
        sequences: The ranks.
        length: Of the whole sequence, in positions.
    """

    layer: nn.Module
    sequences: Sequences
    length: int
    _swapped: list[tuple[dict[str, Any], str, Tensor, Tensor]] = field(default_factory=list)

    def enter(self) -> None:
        """Replace buffers by their parts."""
        for child in self.layer.modules():
            for name, buffer in child._buffers.items():
                if buffer is not None and (part := _rows(buffer, self.sequences, self.length)) is not buffer:
                    self._swapped.append((child._buffers, name, buffer, part))
                    child._buffers[name] = part

    def leave(self) -> None:
        """Put the buffers back, except those that the layer has replaced itself."""
        for buffers, name, whole, part in self._swapped:
            if buffers.get(name) is part:
                buffers[name] = whole
        self._swapped.clear()


def is_count_of_part(sequences: Sequences, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call of `torch.arange` counts from 0 to the length of a part.

    Args:
        sequences: The ranks, and the lengths of parts.
        args: Arguments of `torch.arange`.
        kwargs: Those by name.
    """
    *bounds, end = _bounds(args, kwargs)
    return bounds in ([], [0]) and isinstance(end, int) and sequences.is_part(end)


def positions_of_part(sequences: Sequences, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Positions of this rank's part in the whole sequence, `[part]`, in place of those that `torch.arange` counts.

    Args:
        sequences: The ranks, and the lengths of parts.
        args: Arguments of `torch.arange`.
        kwargs: Those by name.
    """
    return sequences.cut(positions_of_whole(sequences, args, kwargs), 0)


def positions_of_whole(sequences: Sequences, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Positions of the whole sequence, `[length]`, in place of those that `torch.arange` counts.

    Args:
        sequences: The ranks, and the lengths of parts.
        args: Arguments of `torch.arange`.
        kwargs: Those by name.
    """
    rest = {name: value for name, value in kwargs.items() if name not in _BOUNDS}
    return torch.arange(sequences.whole_length(_bounds(args, kwargs)[-1]), **rest)


def sizes_of_whole(sequences: Sequences, func: Any, args: Any) -> Any:
    """Arguments of `torch.zeros` and `Tensor.view` with the sizes of whole sequences, where they are of pairs of parts.

    Args:
        sequences: The ranks, and the lengths of parts.
        func: The function.
        args: Its arguments.
    """
    start = 0 if func is torch.zeros else 1
    own, is_together = args[start:], len(args) > start and not isinstance(args[start], int)
    sizes = list(own[0] if is_together else own)
    if len(sizes) < 2 or not all(isinstance(size, int) and sequences.is_part(size) for size in sizes[-2:]):
        return args
    whole = [*sizes[:-2], *map(sequences.whole_length, sizes[-2:])]
    if start and args[0].numel() != math.prod(whole):
        return args
    return (*args[:start], tuple(whole)) if is_together else (*args[:start], *whole)


_BOUNDS = ("start", "end", "step")


def _bounds(args: Any, kwargs: dict[str, Any]) -> list[Any]:
    return [*args, *(kwargs[name] for name in _BOUNDS if name in kwargs)]


def whole_of(value: Any, *, sequences: Sequences, like: Tensor) -> Any:
    """The whole of a value that is a part as hidden states `like` are: those that an earlier layer returned."""
    dim = sequences.dim
    if not isinstance(value, Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        return value
    if like.shape[dim] == sequences.whole_length(like.shape[dim]):
        return value
    return sequences.join(value.detach(), dim).requires_grad_(value.requires_grad)
