"""Key-value caches, which Hugging Face's models give to their layers even in training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_parallel.errors import ConfigurationError

_SEEN = "_lightning_parallel_seen"


def is_cache(value: Any) -> bool:
    """Whether `value` is a key-value cache, to which layers add."""
    return hasattr(value, "update") and hasattr(value, "get_seq_length")


def without_fresh_cache(layer: nn.Module, values: Iterable[Any]) -> list[Any]:
    """Drop an empty key-value cache from the arguments of a layer; training never reads it.

    Hugging Face's models give one to their layers in training, too. A layer that runs twice would fill it twice, and a
    compiled one would be compiled again for each layer of the stack.

    Args:
        layer: The layer that is about to run.
        values: Its arguments.

    Returns:
        `values` with ``None`` in place of the cache.

    Raises:
        ConfigurationError: If the layer sees the same cache again, which means that the model reads it.
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
