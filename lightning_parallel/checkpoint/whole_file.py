"""A checkpoint in one file, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import copy
import errno
import fcntl
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_parallel.checkpoint.places import lock, put, remove
from lightning_parallel.checkpoint.sharded_folder import is_folder
from lightning_parallel.errors import CheckpointError

_OF_OLD, _ZIP = b"\x80", b"PK"
_MAPPED = ("state_dict", "optimizer_states")
PARTIAL = ".lightning_parallel-*.partial"
"""Names of what is being written, a file or folder beside the one that it will be."""


def write_whole(value: Any, path: Path) -> None:
    """Write `value` as `torch.save` does; whoever opens `path` meanwhile, or after a kill, finds what was there before.

    It is written beside `path`, brought to the disk and renamed. What an earlier process has left there half written
    is removed first.

    Args:
        value: What to save.
        path: The file, in a folder that is made if it is not there.

    Raises:
        CheckpointError: With the path, and the bytes that are needed and free, if it cannot be written.
    """
    num_bytes = bytes_of_tensors(value)
    try:
        with written_aside(path, num_bytes) as file:
            save_into(value, file)
    except OSError as error:
        raise CheckpointError(not_written(path, error, num_bytes)) from error


@contextlib.contextmanager
def written_aside(path: Path, num_bytes: int) -> Iterator[BufferedWriter]:
    """A file to write beside `path`, whose place it takes at the end; after an error `path` is what it was before.

    Args:
        path: The file, in a folder that is made if it is not there.
        num_bytes: What will be written at least.

    Raises:
        OSError: If it cannot be written, and before anything is if there is no room for `num_bytes`.

    Example:
        >>> with written_aside(path, len(data)) as file:
        ...     file.write(data)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not is_folder(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    remove_partial(path.parent)
    check_room(path.parent, num_bytes)
    partial, file = _open_partial(path.parent)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            put(partial, path)  # before it is closed, and with that unlocked
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def save_into(value: Any, file: BufferedWriter) -> None:
    """Save `value` as `torch.save` does.

    Raises:
        OSError: As the disk gave it, which `torch.save` would replace by an error of its own.
    """
    torch.save(value, sink := _Sink(file))  # type: ignore[arg-type] # it needs `write` and `flush`
    if sink.error is not None:
        raise sink.error


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise the error of a full disk at once, and not when it is full, if `folder` has no room for `num_bytes`."""
    if num_bytes > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def remove_partial(folder: Path) -> None:
    """Remove what writers that are gone have left in `folder`; those that are there hold a lock."""
    for partial in folder.glob(PARTIAL):
        with contextlib.suppress(OSError):
            descriptor = os.open(partial, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove(partial)
            finally:
                os.close(descriptor)


def damage_of(path: Path) -> str:
    """The reason why `path` is not the file that was written, in words; "" if it is, as far as it can be told.

    Each part of the file has a checksum (CRC-32), which `torch.load` does not look at. It costs one reading.

    Args:
        path: A file.
    """
    try:
        with path.open("rb") as file:
            begin = file.read(4)
    except OSError as error:
        return f"it cannot be read ({error})"
    if begin.startswith(_OF_OLD):
        return ""  # torch's format of before 1.6, without checksums
    if not path.stat().st_size:
        return "it is empty"
    if not begin.startswith(_ZIP):
        return f"it begins with {begin!r}, as no file of torch.save does"
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        return f"its end is missing or damaged ({error}); it has {path.stat().st_size:,} bytes"
    return "" if damaged is None else f"what it says of {damaged} differs from its checksum"


def read_mapped(path: Path, **options: Any) -> Any:
    """Read as `torch.load` does, but for weights and states of optimizers: their values are read when they are used.

    The file is mapped, so that processes of one machine share what they read of it. All else is in memory, whatever
    becomes of the file. Whoever keeps one of those tensors needs the file: it may be replaced or removed, but not
    written into.

    Args:
        path: A file that `torch.save` has written, in its format since 1.6.
        options: Of `torch.load`.

    Example:
        >>> weights = read_mapped(path, weights_only=True)["state_dict"]
    """
    value = torch.load(path, map_location="cpu", mmap=True, **options)
    if isinstance(value, dict):
        try:
            value.update(copy.deepcopy({key: each for key, each in value.items() if key not in _MAPPED}))
        except Exception:  # of an object of the user's that cannot be copied
            return torch.load(path, map_location="cpu", **options)
    return value


def is_zip(path: Path) -> bool:
    """Whether a file is in torch's format since 1.6."""
    with path.open("rb") as file:
        return file.read(len(_ZIP)) == _ZIP


def bytes_of_tensors(value: Any) -> int:
    """Bytes of the memory of all tensors in mappings, lists and tuples; what several share counts once."""
    storages: dict[int, int] = {}

    def add(each: Any) -> None:
        if isinstance(each, Tensor):
            with contextlib.suppress(NotImplementedError, RuntimeError):  # kinds of tensors that have no storage
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, Mapping):
            for inner in each.values():
                add(inner)
        elif isinstance(each, list | tuple):
            for inner in each:
                add(inner)

    add(value)
    return sum(storages.values())


class _Sink:
    """A file for `torch.save`, which would replace an error of the disk by one of its own.

    Args:
        file: What to write to.
    """

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Write `data`, or note why that cannot be done and drop the rest."""
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def flush(self) -> None:
        """Do nothing: the file is flushed when all is written."""


def _open_partial(folder: Path) -> tuple[Path, BufferedWriter]:
    """A new file that is locked as long as it is open. Its mode is that of any new file, not a temporary one's."""
    while True:
        partial = folder / PARTIAL.replace("*", secrets.token_hex(8))
        file = partial.open("xb")
        if lock(file.fileno()) and partial.exists():
            return partial, file
        file.close()  # another writer has removed it before it was locked


def bytes_of_state(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Bytes of all parameters, and of what optimizers keep for them, whole. No collective.

    Args:
        module: The module.
        optimizers: Their state of this rank's parameters is taken to be that of all.
    """
    of_model = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    of_parameters = of_state = 0
    for parameter, entries in (item for optimizer in optimizers for item in optimizer.state.items()):
        of_parameters += parameter.numel() * parameter.element_size()
        of_state += sum(each.numel() * each.element_size() for each in entries.values() if isinstance(each, Tensor))
    return of_model + of_state * of_model // max(1, of_parameters)


def not_written(path: Path, error: OSError, num_bytes: int) -> str:
    """Say that a checkpoint could not be written.

    Args:
        path: The checkpoint.
        error: Why.
        num_bytes: Bytes that it needs.
    """
    folder = next((each for each in path.parents if each.is_dir()), path.parent)
    free = shutil.disk_usage(folder).free if folder.is_dir() else 0
    why = error.strerror or str(error)
    return (
        f"the checkpoint {path} could not be written: {why}. Its tensors take {num_bytes:,} bytes, and {free:,} are "
        f"free on the file system of {folder}, where a quota may allow less. Make room, write to another folder "
        "(ModelCheckpoint(dirpath=...)), or let training go on without it: on_save_error='warn'. Checkpoints that were "
        "there are unchanged"
    )
