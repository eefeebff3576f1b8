"""Outputs of a stack for all microbatches, joined for the one run of the rest of the step on the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.placeholders import is_placeholder

Passed = tuple[Tensor, ...]
"""Tensors that a stage sends on: hidden states, `[batch, length, width]`, then side inputs."""
PartGradients = list[tuple[Tensor | None, ...]]
"""For each microbatch, the gradients of the tensors that its last stage has computed."""


@dataclass(frozen=True)
class RowOrder:
    """The rows that a stack is given for each sample.

    Args:
        rows: Their number.
        in_views: Whether the first rows of all samples stand before all second ones, as ``torch.cat([first, second])``
            of two views of a batch leaves them; else, those of a sample stand together.
    """

    rows: int = 1
    in_views: bool = False


IN_ORDER = RowOrder()


class JoinedOutputs:
    """The outputs of the last stage for all microbatches, joined as they are asked for.

    They are joined from new leaves of the graph, at which backward through the rest of the step ends; the step may
    write into what is joined. What has no dimension of samples, such as a sum over them, stays a placeholder, which
    nothing can read.

    Args:
        parts: For each microbatch, the tensors that the last layer returned, then side inputs of the stage, then what
            it has kept of its own.
        num_side_inputs: The number of these, and of what was kept.
        order: The order of rows.
        part_size: The samples of a microbatch.
        seen: Keeps how many rows of each sample tensors have had.
    """

    def __init__(
        self,
        parts: Sequence[Passed],
        num_side_inputs: int = 0,
        *,
        order: RowOrder | None = None,
        part_size: int = 1,
        seen: dict[int, Fraction] | None = None,
    ) -> None:
        self._parts, self._order, self._part_size = parts, order or IN_ORDER, part_size
        self._seen = {} if seen is None else seen
        self._first_side_input = len(parts[0]) - num_side_inputs
        self._joined: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self.unjoined = ""
        """The values of layers that have no dimension of samples, in words, if there are any."""

    def in_place_of(self, result: Any, path: str) -> Any:
        """Return what the last layer would return for the whole batch.

        Args:
            result: The same, as placeholders.
            path: The path of the layer, for messages.

        Raises:
            ConfigurationError: For other numbers of tensors than for a microbatch.
        """
        leaves, spec = tree_flatten(result)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if len(places) != self._first_side_input:
            returned = f"{path} returns {self._first_side_input} tensors for a microbatch and {len(places)} for a batch"
            raise ConfigurationError([f"{returned}, so that they cannot be joined; {_ADVICE}"])
        for number, place in enumerate(places):
            leaves[place] = self._join(number, leaves[place])
            if is_placeholder(leaves[place]):
                self.unjoined = self.unjoined or f"what {path} returns"
        return tree_unflatten(leaves, spec)

    def side_inputs(self, placeholders: Sequence[Tensor], *, after: int = 0) -> list[Tensor]:
        """Return some of the side inputs of the last stage, and of what it has kept, for the whole batch.

        Args:
            placeholders: They have the shapes.
            after: The number of those before them.
        """
        start = self._first_side_input + after
        return [self._join(start + number, like) for number, like in enumerate(placeholders)]

    def gradients(self) -> PartGradients:
        """Return the gradients of what was joined, for each microbatch, once backward has run."""
        found: list[list[Tensor | None]] = [[None] * len(part) for part in self._parts]
        for number, (_, leaves) in self._joined.items():
            for own, leaf in zip(found, leaves, strict=True):
                own[number] = leaf.grad
        return [tuple(own) for own in found]

    def _check_rows(self, number: int, rows: Fraction) -> None:
        """Refuse rows of samples that had one each, or another number of views, where their order was looked at."""
        known = self._seen.setdefault(number, rows)
        if rows != known and (self._order.in_views or known <= 1 < rows):
            given = f"the layers return {rows} rows for each sample, and returned {known} in a batch before"
            raise ConfigurationError([f"{given}, so that nobody knows their order; {_ADVICE}"])

    def _join(self, number: int, like: Tensor) -> Tensor:
        """Join one tensor to the shape of `like`, which stays in its place if there is no dimension of samples."""
        if number not in self._joined:
            pieces = [part[number] for part in self._parts]
            dim = batch_dim(pieces, like.shape)
            if dim is None:
                return like
            has_graph = any(piece.requires_grad for piece in pieces) and torch.is_grad_enabled()
            leaves = [piece.detach().requires_grad_(has_graph) for piece in pieces]
            if len(leaves) > 1:
                self._check_rows(number, Fraction(leaves[0].shape[dim], self._part_size))
            self._joined[number] = joined_rows(leaves, dim, self._order, self._part_size), leaves
        return self._joined[number][0]


def joined_rows(pieces: Sequence[Tensor], dim: int, order: RowOrder, part_size: int) -> Tensor:
    """Join rows of microbatches in the order in which one process has those of the batch.

    Args:
        pieces: Of each microbatch.
        dim: The dimension of rows.
        order: The order of those that the stack is given. Others, such as one for each sample, are in order.
        part_size: The samples of a microbatch.
    """
    if not order.in_views or pieces[0].shape[dim] != order.rows * part_size:
        return torch.cat(list(pieces), dim)
    of_pieces = [piece.chunk(order.rows, dim) for piece in pieces]
    return torch.cat([each for of_view in zip(*of_pieces, strict=True) for each in of_view], dim)


def batch_dim(pieces: Sequence[Tensor], whole: torch.Size) -> int | None:
    """The dimension along which `pieces` are cut; ``None`` where there is none.

    Args:
        pieces: Of each microbatch.
        whole: The shape of that of the whole batch.
    """
    part = pieces[0].shape
    if len(part) != len(whole) or any(piece.shape != part for piece in pieces):
        return None
    if len(pieces) == 1 and part:
        return 0
    dims = [dim for dim, (size, all_of_it) in enumerate(zip(part, whole, strict=True)) if size != all_of_it]
    return dims[0] if len(dims) == 1 and part[dims[0]] * len(pieces) == whole[dims[0]] else None


_ADVICE = (
    "give loss='microbatch' where the loss is a mean of equally weighted samples, or schedule='turns' or pipeline=1"
)
