"""A folder of files, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_parallel.checkpoint.whole_file import PARTIAL, check_room, remove_partial, sync_folder

_AT_CWD, _EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: paths from the working directory, and that the two change places."""


@contextlib.contextmanager
def folder_aside(path: Path, num_bytes: int) -> Iterator[Path]:
    """A folder to fill beside `path`, whose place it takes at the end; after an error `path` is what it was before.

    Args:
        path: The folder; those above it are made if they are not there.
        num_bytes: Bytes that will be written at least.

    Raises:
        OSError: If it cannot be written, and before anything is if there is no room for `num_bytes`.

    Example:
        >>> with folder_aside(path, len(text)) as folder:
        ...     (folder / "config.json").write_text(text)
    """
    path = path.resolve()  # a link stays, and what it leads to is replaced
    with partial_folder(path, num_bytes) as partial:
        yield partial
        for each in partial.iterdir():
            sync_file(each)
        put(partial, path)


@contextlib.contextmanager
def partial_folder(path: Path, num_bytes: int) -> Iterator[Path]:
    """A new folder beside `path`, in which something is written; removed again if it has not got another name.

    Args:
        path: The folder that it is going to be.
        num_bytes: Bytes that it needs.

    Raises:
        OSError: If there is no room, or nothing can be written there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_partial(path.parent)
    check_room(path.parent, num_bytes)
    partial = path.parent / PARTIAL.replace("*", secrets.token_hex(8))
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
    finally:
        os.close(lock)
        _remove(partial)


def put(partial: Path, path: Path) -> None:
    """Give a folder the name under which it is read. What has that name is there until then, where Linux can do that.

    Args:
        partial: The folder, written.
        path: The name.
    """
    sync_folder(partial)
    if not path.exists():
        partial.rename(path)
    elif not _exchange(partial, path):
        before = partial.with_suffix(".replaced")
        path.rename(before)  # a kill just then leaves it there
        try:
            partial.rename(path)
        except BaseException:
            before.rename(path)
            raise
        _remove(before)
    sync_folder(path.parent)


def _exchange(partial: Path, path: Path) -> bool:
    """Let two names change places, if the system can do that; whoever has made `partial` removes what it names then."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return exchange is not None and not exchange(_AT_CWD, os.fsencode(partial), _AT_CWD, os.fsencode(path), _EXCHANGE)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Bring a file to the disk.

    Raises:
        OSError: If that is impossible.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
