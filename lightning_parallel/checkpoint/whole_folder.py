"""A folder of files, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_parallel.checkpoint.whole_file import check_room, sync_folder

_PARTIAL = ".lightning_parallel-*.partial"
_REPLACED = ".lightning_parallel-*.replaced"


@contextlib.contextmanager
def folder_aside(path: Path, num_bytes: int) -> Iterator[Path]:
    """A folder to fill beside `path`, whose place it takes at the end; after an error `path` is what it was before.

    A folder that is at `path` is replaced with all that is in it. Between the two renames that this takes, there is
    none; after a kill just then, the former one lies beside it under a hidden name.

    Args:
        path: The folder; those above it are made if they are not there.
        num_bytes: What will be written at least.

    Raises:
        OSError: If it cannot be written, and before anything is if there is no room for `num_bytes`.

    Example:
        >>> with folder_aside(path, len(text)) as folder:
        ...     (folder / "config.json").write_text(text)
    """
    path = path.resolve()  # a link stays, and what it leads to is replaced
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_partial(path.parent)
    check_room(path.parent, num_bytes)
    partial = path.parent / _PARTIAL.replace("*", secrets.token_hex(8))
    partial.mkdir()
    try:
        with _locked(partial):
            yield partial
            for each in partial.iterdir():
                _sync_file(each)
            sync_folder(partial)
            _put_in_place(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_folder(path.parent)


def _put_in_place(partial: Path, path: Path) -> None:
    if not path.exists():
        partial.rename(path)
        return
    before = path.parent / _REPLACED.replace("*", secrets.token_hex(8))
    path.rename(before)
    try:
        partial.rename(path)
    except BaseException:
        before.rename(path)
        raise
    shutil.rmtree(before)


def _remove_partial(folder: Path) -> None:
    """Remove what writers that are gone have left in `folder`; those that are there hold a lock."""
    for partial in folder.glob(_PARTIAL):
        if partial.is_dir():
            with contextlib.suppress(OSError), _locked(partial, must=True):
                shutil.rmtree(partial)


@contextlib.contextmanager
def _locked(folder: Path, *, must: bool = False) -> Iterator[None]:
    """Hold a lock on a folder.

    Args:
        folder: The folder.
        must: Raise an error if another process has it, or the file system has no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.nullcontext() if must else contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
