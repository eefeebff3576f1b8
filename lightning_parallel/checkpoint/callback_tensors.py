"""Tensors in the state of a callback of which each rank has its own part, apart from the rest of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_parallel.checkpoint.stored_tensors import StoredFolder, StoredTensors

CALLBACKS, TAKEN = "callbacks", "callback_tensors"
"""Key of the states of callbacks, and that under which a folder's `rest.pt` says which tensors are not in them."""


class TensorsOfRanks(dict[str, Tensor]):
    """Name -> a rank's own tensor or shard, where a callback's state has whole ones in other checkpoints.

    All ranks have all names in the same order; what a rank has nothing of is on the meta device.
    """


class _Gone:
    """In the place of what is taken out of a state."""


Taken = list[tuple[list[Any], list[str]]]
"""The keys under which tensors of ranks were, from the outermost on, and their names."""


def take_apart(callbacks: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], Taken]:
    """Take tensors of ranks out of the states of callbacks.

    Args:
        callbacks: Key of a callback's state -> the state.

    Returns:
        Key in the files -> this rank's tensor; the states without them; and what `put_back` needs to know.
    """
    tensors: dict[str, Tensor] = {}
    taken: Taken = []

    def without(state: Any, keys: list[Any]) -> Any:
        if isinstance(state, TensorsOfRanks):
            taken.append((keys, list(state)))
            tensors.update({_prefix(keys) + name: value for name, value in state.items() if not value.is_meta})
            return _Gone
        if type(state) is not dict:
            return state
        rest = {key: without(value, [*keys, key]) for key, value in state.items()}
        return {key: value for key, value in rest.items() if value is not _Gone}

    states = {key: without(state, [key]) for key, state in callbacks.items()}
    return tensors, states, taken


def put_back(callbacks: Mapping[str, Any], taken: Taken, folder: StoredFolder) -> None:
    """Give the states of callbacks their tensors, which are read when they are asked for.

    Args:
        callbacks: The states, changed in place.
        taken: As `take_apart` has it.
        folder: The files.
    """
    for keys, names in taken:
        state: Any = callbacks
        for key in keys[:-1]:
            state = state[key]
        state[keys[-1]] = stored = StoredTensors(folder, _prefix(keys))
        stored.arrange(names, {})


def _prefix(keys: list[Any]) -> str:
    return ".".join(map(str, [CALLBACKS, *keys, ""]))
