"""Tensors that hooks collect from layers on parts of sequences, joined to those of whole ones."""

from __future__ import annotations

import functools

from torch import Tensor

from lightning_parallel.errors import ConfigurationError
from lightning_parallel.module.collected import Collected, replace_collected
from lightning_parallel.techniques.context.sequences import Sequences


def join_hidden(part: Tensor, sequences: Sequences) -> None:
    """Where a hook on the layer before has collected what it returned, let it have the whole of it. A collective.

    Args:
        part: The hidden states that the layer before has returned.
        sequences: Of which they are a part.
    """
    replace_collected(part, lambda part: sequences.join(part, sequences.dim))


def join_collected(collected: Collected | None, sequences: Sequences, *, part: Tensor, path: str) -> None:
    """Let hooks inside of a layer have the whole of what they have collected. A collective.

    Args:
        collected: By them; ``None`` where nobody collects.
        sequences: Of which the layer holds parts.
        part: Hidden states of the layer.
        path: Where the layer is.
    """
    if collected is not None:
        collected.replace(functools.partial(_joined, sequences=sequences, part=part, path=path))


def _joined(entry: Tensor, *, sequences: Sequences, part: Tensor, path: str) -> Tensor:
    """The whole of ``[batch, positions, ...]`` or ``[batch * positions, ...]``, or with positions before the batch."""
    shape = part.shape[:2]
    if entry.shape[:2] == shape:
        return sequences.join(entry, sequences.dim)
    if entry.ndim and entry.shape[0] == shape.numel():
        return sequences.join(entry.unflatten(0, shape), sequences.dim).flatten(0, 1)
    raise ConfigurationError(
        [
            f"a hook inside of {path} collects a tensor {tuple(entry.shape)}, which a rank computes from its part of "
            "the sequence, and which nobody can join: only one that begins with batch and positions can be. Leave it "
            "out (output_attentions and the like), or give context=1"
        ]
    )
