"""A checkpoint to look into: its tensors stay on the disk until one is read."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.sharded_folder import damage_of_folder, is_folder, open_folder
from lightning_parallel.checkpoint.stored_tensors import StoredTensors
from lightning_parallel.checkpoint.whole_file import damage_of, is_zip
from lightning_parallel.errors import CheckpointError

_REFUSED_CLASS = re.compile(r"GLOBAL (\S+) was not an allowed")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint, without its values.

    Args:
        name: Its key in the ``state_dict``.
        shape: Its sizes.
        dtype: Its dtype.
        tied_to: The first name of the same tensor; "" if this is the first, or the only one.
        is_held: Whether reading it twice gives the same memory, as of a mapped file: to keep it then takes no more.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tied_to: str = ""
    is_held: bool = False

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements; those of a tied one are those of the first."""
        return self.numel * self.dtype.itemsize


def open_checkpoint(path: Path, *, unsafe: bool = False) -> dict[str, Any]:
    """Open a checkpoint, without reading its tensors.

    Nothing is run that the file asks for, unless it is trusted: pickles can name any function.

    Args:
        path: A file that Lightning or `torch.save` has written, a plain ``state_dict`` too; or the folder of a sharded
            checkpoint.
        unsafe: Whether to unpickle objects of any class, which runs code that the file names.

    Returns:
        What the file holds, by key. Under ``"state_dict"`` is a mapping of tensors: take one at a time by its name,
        since other forms of checkpoints read it from the disk then.

    Raises:
        CheckpointError: If there is no such file, if it is no checkpoint, or if it holds objects of classes that are
            only unpickled with `unsafe`; with their names.

    Example:
        >>> weight = open_checkpoint(Path("last.ckpt"))["state_dict"]["model.head.weight"]
    """
    _check_path(path)
    if is_folder(path):
        return open_folder(path, lambda rest: dict(_load(rest, unsafe=unsafe)))
    value = _load(path, unsafe=unsafe)
    if isinstance(value, Mapping) and isinstance(value.get("state_dict"), Mapping):
        return dict(value)
    if isinstance(value, Mapping) and value and all(isinstance(each, Tensor) for each in value.values()):
        return {"state_dict": value}
    held = f"the keys {', '.join(map(str, list(value)[:8]))}" if isinstance(value, Mapping) else type(value).__name__
    raise CheckpointError(
        f"{path} is no checkpoint: it holds {held}, and no state_dict. Give a file that Trainer.save_checkpoint or "
        "torch.save(module.state_dict()) has written"
    )


def damage_in(path: Path) -> str:
    """The reason why a checkpoint is not what was written, in words; "" if it is. Costs one reading.

    Args:
        path: The checkpoint.

    Raises:
        CheckpointError: If there is none.
    """
    _check_path(path)
    return damage_of_folder(path) if is_folder(path) else damage_of(path)


def entries_of(weights: Mapping[str, Tensor]) -> list[TensorEntry]:
    """The tensors of a checkpoint, in its order; what else is in a ``state_dict`` (extra state) is left out.

    Tied names are those of the same memory, which can only be seen where memory stays the same: a mapping that reads
    anew each time gives every tensor a place of its own.

    Args:
        weights: The mapping under ``"state_dict"``; each tensor is asked for twice.
    """
    if isinstance(weights, StoredTensors):
        return _entries_of_folder(weights.described())
    first: dict[tuple[Any, ...], str] = {}
    entries = []
    for name in weights:
        tensor = weights[name]
        if not isinstance(tensor, Tensor):
            continue
        place = _place(tensor)
        is_held = place is not None and place == _place(weights[name])
        tied_to = ""
        if place is not None and is_held and tensor.numel():
            tied_to = first.setdefault(place, name)
        entries.append(
            TensorEntry(name, tuple(tensor.shape), tensor.dtype, "" if tied_to == name else tied_to, is_held)
        )
    return entries


def _entries_of_folder(described: Mapping[str, Any]) -> list[TensorEntry]:
    first: dict[int, str] = {}
    tensors = {name: each for name, each in described.items() if isinstance(each, Tensor)}
    return [
        TensorEntry(
            name, tuple(each.shape), each.dtype, "" if (known := first.setdefault(id(each), name)) == name else known
        )
        for name, each in tensors.items()
    ]


def _place(tensor: Tensor) -> tuple[Any, ...] | None:
    """Where its elements are; ``None`` for kinds of tensors that have no storage."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        return None
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _check_path(path: Path) -> None:
    if path.is_file() or is_folder(path):
        return
    if path.is_dir():
        inside = sorted(path.glob("*.ckpt"))
        example = inside[0] if inside else path / "last.ckpt"
        raise CheckpointError(f"{path} is a folder, and no sharded checkpoint; give the path of one, such as {example}")
    raise CheckpointError(
        f"there is no file {path}; give the path of a checkpoint on this machine, and copy one that is elsewhere"
    )


def _load(path: Path, *, unsafe: bool) -> Any:
    is_mapped = is_zip(path)  # torch's format of before 1.6 cannot be
    try:
        # To the host: a file from a GPU is read on machines without one.
        return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=not unsafe)
    except pickle.UnpicklingError as error:
        if refused := _refused_classes(path, error):
            raise CheckpointError(
                f"{path} holds objects of {refused}, which are not unpickled unless the file is trusted: that runs "
                "code which the file names. If you know who wrote it, give --unsafe (in Python, unsafe=True)"
            ) from None
        raise CheckpointError(_unreadable(path, error)) from None
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"{path} holds an object whose class cannot be imported here ({error}); call this where that code can be "
            "imported, such as in its folder"
        ) from None
    except Exception as error:
        raise CheckpointError(_unreadable(path, error)) from None


def _refused_classes(path: Path, error: Exception) -> str:
    """The names of classes that `torch.load` does not know to be harmless; "" if it fails for another reason."""
    try:
        names = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # of a damaged file, and of the format of before 1.6
        names = set(_REFUSED_CLASS.findall(str(error)))
    return ", ".join(sorted(names))


def _unreadable(path: Path, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    return f"{path} cannot be read by torch.load ({reason}); give a checkpoint that Lightning or torch.save has written"
