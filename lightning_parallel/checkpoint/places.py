"""The name under which a checkpoint is read, given to what is written in place of what is there."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
from pathlib import Path

_AT_CWD, _EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: paths from the working directory, and that the two change places."""

_OTHER_FORM = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)


def put(partial: Path, path: Path) -> None:
    """Give a file or folder the name under which it is read. What has that name, of either kind, is there until then.

    Args:
        partial: What is written, and on the disk.
        path: The name; a link there is replaced, and what it leads to stays.

    Raises:
        OSError: If that is impossible; then `path` is what it was before.
    """
    if not _replace(partial, path):
        if _exchange(partial, path):
            remove(partial)
        else:
            _put_by_renames(partial, path)
    sync_folder(path.parent)


def _replace(partial: Path, path: Path) -> bool:
    """Rename over `path`; ``False`` if a folder is in the way, or what is there is none and a folder replaces it.

    No look beforehand would do: another writer may put something there in between.
    """
    try:
        partial.replace(path)
    except OSError as error:
        if error.errno not in _OTHER_FORM:
            raise
        return False
    return True


def _put_by_renames(partial: Path, path: Path) -> None:
    """Do so where two names cannot change places at once: a kill in between leaves what is new beside `path`."""
    new = path.with_name(f"{path.stem}-new{path.suffix}")  # ckpt_path="last" finds it, too
    before = partial.with_stem(f"{partial.stem}-before")  # whoever writes next removes it
    remove(new)
    partial.rename(new)
    try:
        path.rename(before)
        new.rename(path)
    except BaseException:
        if not os.path.lexists(path):
            before.rename(path)
        remove(new)
        raise
    remove(before)


def check_place(path: Path, is_checkpoint: bool) -> None:
    """Raise an error where a folder is that is no checkpoint: what is in it would be gone.

    Args:
        path: The name of what is going to be written.
        is_checkpoint: Whether a checkpoint is there.

    Raises:
        OSError: If so.
    """
    if _is_own_folder(path) and not is_checkpoint and any(path.iterdir()):
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))


def lock(descriptor: int) -> bool:
    """Lock a file or folder that has just been made; ``False`` if another writer, who is removing it, was faster."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # file systems without locks
        pass
    return True


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it, if it is there."""
    if _is_own_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring the names in `folder` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot; the file itself is on the disk
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(partial: Path, path: Path) -> bool:
    """Let two names change places, if the system can do that."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return exchange is not None and not exchange(_AT_CWD, os.fsencode(partial), _AT_CWD, os.fsencode(path), _EXCHANGE)
