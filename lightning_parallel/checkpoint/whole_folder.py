"""A folder of files, which is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from lightning_parallel.checkpoint.places import lock, put, remove, sync_folder
from lightning_parallel.checkpoint.whole_file import PARTIAL, check_room, remove_partial


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
        sync_folder(partial)
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
    partial, descriptor = _locked_folder(path.parent)
    try:
        yield partial
    finally:
        os.close(descriptor)
        remove(partial)


def _locked_folder(parent: Path) -> tuple[Path, int]:
    """A new folder, and what holds a lock of it as long as it is open."""
    while True:
        partial = parent / PARTIAL.replace("*", secrets.token_hex(8))
        partial.mkdir()
        with contextlib.suppress(FileNotFoundError):  # another writer has removed it before it was locked
            descriptor = os.open(partial, os.O_RDONLY)
            if lock(descriptor) and partial.exists():
                return partial, descriptor
            os.close(descriptor)


def sync_file(path: Path) -> None:
    """Bring a file to the disk.

    Raises:
        OSError: If that is impossible.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())
