"""Caches of keys and values that Hugging Face's models hand to their layers, in training too. Layer 1."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_parallel.errors import ConfigurationError

_SEEN = "_lightning_parallel_seen"


def is_cache(value: Any) -> bool:
    """Whether `value` is such a cache: layers add to it."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def without_fresh_cache(layer: nn.Module, values: Iterable[Any]) -> list[Any]:
    """`values` with ``None`` in place of an empty cache of keys and values that a layer would fill for nobody.

    Hugging Face's models hand one to their layers in training, too. A layer that runs twice would fill it twice, and a
    compiled one would be compiled anew for each layer.

    Args:
        layer: The layer that is about to run.
        values: Its arguments.

    Raises:
        ConfigurationError: If the layer sees such a cache again: somebody reads it.
    """
    return [None if _is_fresh_cache(layer, value) else value for value in values]


def _is_fresh_cache(layer: nn.Module, value: Any) -> bool:
    if not is_cache(value) or int(value.get_seq_length()):
        return False
    seen = value.__dict__.setdefault(_SEEN, set())
    if id(layer) in seen:
        raise ConfigurationError(
            [
                f"{type(layer).__name__} is given a cache of keys and values for the second time, so it is read in "
                "training, and it was left empty: layers that are recomputed, compiled or split cannot fill one. "
                "Leave these options out, or keep what the layers attend to in the batch"
            ]
        )
    seen.add(id(layer))
    return True
