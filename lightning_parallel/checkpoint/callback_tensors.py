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


def take_apart(callbacks: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Take tensors of ranks out of the states of callbacks.

    Args:
        callbacks: Key of a callback's state -> the state.

    Returns:
        Key in the files -> this rank's tensor; the states without them; and what `put_back` needs to know.
    """
    tensors: dict[str, Tensor] = {}
    states, taken = dict(callbacks), dict[str, Any]()
    for key, state in callbacks.items():
        found = {entry: value for entry, value in _entries(state) if isinstance(value, TensorsOfRanks)}
        if not found:
            continue
        states[key] = {entry: value for entry, value in state.items() if entry not in found}
        taken[key] = {entry: list(value) for entry, value in found.items()}
        for entry, values in found.items():
            tensors |= {_prefix(key, entry) + name: value for name, value in values.items() if not value.is_meta}
    return tensors, states, taken


def put_back(callbacks: Mapping[str, Any], taken: Mapping[str, Any], folder: StoredFolder) -> None:
    """Give the states of callbacks their tensors, which are read when they are asked for.

    Args:
        callbacks: The states, changed in place.
        taken: As `take_apart` has it.
        folder: The files.
    """
    for key, entries in taken.items():
        for entry, names in entries.items():
            callbacks[key][entry] = stored = StoredTensors(folder, _prefix(key, entry))
            stored.arrange(names, {})


def _entries(state: Any) -> Any:
    return state.items() if isinstance(state, Mapping) else ()


def _prefix(key: str, entry: str) -> str:
    return f"{CALLBACKS}.{key}.{entry}."
