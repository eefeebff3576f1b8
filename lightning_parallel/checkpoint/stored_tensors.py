"""Tensors in the folder of a sharded checkpoint, read when they are asked for, whole or a rank's part."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from typing_extensions import override

_CLASSES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
}
"""Classes that torch writes into a folder's ``.metadata``, beside dtypes and those of `_OF_METADATA`."""
_OF_METADATA = "torch.distributed.checkpoint.metadata"


class StoredFolder(dcp.FileSystemReader):
    """The files of tensors of a folder; what they hold is read once, and unpickled to torch's own classes alone.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        with (path / ".metadata").open("rb") as file:
            metadata: Metadata = _Unpickler(file).load()
        self.tensors: Mapping[str, Any] = metadata.state_dict_metadata
        self._metadata = metadata

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors, or this rank's parts of them. No collective.

        Args:
            targets: Key -> a tensor of the stored shape, or a DTensor of which this rank's part is read.
        """
        read_alone(targets, self)


def read_alone(targets: Mapping[str, Tensor], reader: dcp.StorageReader) -> None:
    """Read tensors, or this rank's parts of them. No collective.

    Args:
        targets: Key -> a tensor of the stored shape, or a DTensor of which this rank's part is read.
        reader: Of the files.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        dcp.load(dict(targets), storage_reader=reader, no_dist=True)


class _Unpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # as Python 3.13 writes it, and no other version reads it
            module = "pathlib"
        is_known = module == _OF_METADATA or (module, name) in _CLASSES
        if is_known or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong there")


class StoredTensors(MutableMapping[str, Any]):
    """Name -> tensor, in host memory, read each time that it is asked for. Changes are kept in memory alone.

    Args:
        folder: The files.
        prefix: Beginning of the keys, which names do not have.
        aliases: Name -> the name under which a tied tensor is stored.

    Example:
        >>> weights = StoredTensors(StoredFolder(path), "state_dict.")
        >>> weights["model.head.weight"]
    """

    def __init__(self, folder: StoredFolder, prefix: str, aliases: Mapping[str, str] | None = None) -> None:
        self.folder, self._prefix = folder, prefix
        own = {key.removeprefix(prefix): key for key in folder.tensors if key.startswith(prefix)}
        tied = {alias: own[name] for alias, name in (aliases or {}).items()}
        self._stored: dict[str, Any] = {name: _Key(key) for name, key in {**own, **tied}.items()}

    def __getitem__(self, name: str) -> Any:
        stored = self._stored[name]
        if not isinstance(stored, _Key):
            return stored
        described = self.folder.tensors[stored]
        whole = torch.empty(described.size, dtype=described.properties.dtype)
        self.folder.read({stored: whole})
        return whole

    def __setitem__(self, name: str, value: Any) -> None:
        self._stored[name] = value

    def __delitem__(self, name: str) -> None:
        del self._stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._stored))

    def __len__(self) -> int:
        return len(self._stored)

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredTensors:
        # Lightning copies the state of a callback before it is loaded: the files are the same, and stay unread.
        twin = copy.copy(self)
        twin._stored = copy.deepcopy(self._stored, memo)
        return twin

    def arrange(self, order: Sequence[str], others: Mapping[str, Any]) -> None:
        """Put the names into an order, and add what is no tensor.

        Args:
            order: Names, of which some may not be there.
            others: Name -> value.
        """
        known = {**self._stored, **others}
        self._stored = {name: known[name] for name in [*order, *known] if name in known}

    def described(self) -> dict[str, Any]:
        """The same without the tensors' values, on the meta device; tied names have one tensor."""
        known: dict[str, Tensor] = {}

        def of(stored: Any) -> Any:
            if isinstance(stored, _Key) and stored not in known:
                each = self.folder.tensors[stored]
                known[stored] = torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            return known[stored] if isinstance(stored, _Key) else stored

        return {name: of(stored) for name, stored in self._stored.items()}

    def shape_of(self, name: str) -> torch.Size | None:
        """The shape of a tensor in the files, which is not read; ``None`` for what is not there."""
        stored = self._stored[name]
        return self.folder.tensors[stored].size if isinstance(stored, _Key) else None

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors into others, or this rank's parts of them. No collective.

        Args:
            targets: The name of a tensor in the files -> a tensor of its whole shape, which may be sharded.
        """
        self.folder.read({self._stored[name]: target for name, target in targets.items()})

    def part_like(self, name: str, like: Tensor | None, reads: dict[str, Tensor] | None = None) -> Any:
        """The value of this name: this rank's part of it, if `like` is sharded and has its shape.

        Args:
            name: The name.
            like: A tensor, maybe sharded.
            reads: Takes what is to be filled with its values, for `StoredFolder.read` of many at once.
        """
        shape = self.shape_of(name)
        if not isinstance(like, DTensor) or shape != like.shape:
            # One that is going to be sharded otherwise is read now: what is asked for later has no values yet.
            if reads is None or shape is None or (isinstance(like, DTensor) and len(shape)):
                return self[name]
            key = self._stored[name]
            reads[key] = torch.empty(shape, dtype=self.folder.tensors[key].properties.dtype)
            return reads[key]
        described = self.folder.tensors[self._stored[name]]
        local = torch.empty_like(like.to_local(), dtype=described.properties.dtype)
        part = DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
        if reads is None:
            self.read_into({name: part})
        else:
            reads[self._stored[name]] = part
        return part


class _Key(str):
    """The key of a tensor in the files."""

    __slots__ = ()
