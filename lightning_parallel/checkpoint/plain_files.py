"""Weights of a checkpoint in torch's own format: a plain ``state_dict``, or what ``load_from_checkpoint`` reads."""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.chosen_weights import ChosenWeights
from lightning_parallel.errors import CheckpointError

VERSION = "pytorch-lightning_version"
_OF_TRAINING = ("callbacks", "optimizer_states", "lr_schedulers", "lightning_parallel")
"""Keys that only training reads: the last one has the random states of the ranks."""


def state_dict_of(weights: ChosenWeights, folder: Path) -> OrderedDict[str, Any]:
    """A ``state_dict`` to save: no tensor of it is in memory, and tied names have one tensor.

    Args:
        weights: The tensors.
        folder: Where tensors that are made here (converted ones, and averages) lie until they are saved.

    Raises:
        OSError: If there is no room in `folder`.
    """
    found: OrderedDict[str, Any] = OrderedDict()
    for name, entry in weights.entries.items():
        if entry.tied_to:
            found[name] = found[entry.tied_to]
        else:
            found[name] = weights[name] if entry.is_held else _on_disk(weights[name], folder)
    found.update(weights.others)
    if (versions := weights.module_versions) is not None:
        found._metadata = versions  # type: ignore[attr-defined] # as `Module.state_dict` notes them
    return found


def without_training(checkpoint: Mapping[str, Any], state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint of Lightning's without states of training: as with ``save_checkpoint(path, weights_only=True)``.

    What the user's hooks have added is kept, since ``load_from_checkpoint`` gives it to `on_load_checkpoint`.

    Args:
        checkpoint: An open checkpoint.
        state_dict: Its weights.

    Raises:
        CheckpointError: If it is none of Lightning's.
    """
    if VERSION not in checkpoint:
        raise CheckpointError(
            f"--to lightning: there is no {VERSION} in it, so Lightning has not written it; give a checkpoint of a "
            "Trainer, or --to torch"
        )
    kept = {key: value for key, value in checkpoint.items() if key not in _OF_TRAINING}
    return {**kept, "state_dict": state_dict}


def _on_disk(tensor: Tensor, folder: Path) -> Tensor:
    """A copy in a file without a name, mapped into memory, which the system writes out and drops as it needs room."""
    num_bytes = tensor.numel() * tensor.dtype.itemsize
    if num_bytes == 0:
        return tensor.clone()
    path = folder / f".lightning_parallel-{secrets.token_hex(8)}.partial"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        # A mapped file for which the disk has no room would end the process when it is written to.
        os.posix_fallocate(descriptor, 0, num_bytes)
        mapped = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
    finally:
        os.close(descriptor)
        path.unlink()
    copy = mapped.view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
