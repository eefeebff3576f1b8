"""A checkpoint in a folder, to which each rank writes what it holds; it is there whole or not at all.

Tensors are in the files of torch.distributed.checkpoint, all else in `rest.pt`, and a manifest says what there is.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint.stored_tensors import StoredFolder, StoredTensors
from lightning_parallel.checkpoint.whole_file import PARTIAL, not_written, remove_partial
from lightning_parallel.errors import CheckpointError

FORMAT = 1
"""Version of the format of folders."""
MANIFEST, REST = "manifest.json", "rest.pt"
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
_BLOCK = 1 << 22
_AT_CWD, _EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: paths from the working directory, and that the two change places."""


@contextlib.contextmanager
def partial_folder(path: Path, num_bytes: int) -> Iterator[Path]:
    """A new folder beside `path`, in which a checkpoint is written; removed again if it has not got another name.

    Args:
        path: Where the checkpoint is going to be.
        num_bytes: Bytes that it needs.

    Raises:
        CheckpointError: If there is no room, or nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partial(path.parent)
        if num_bytes > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        partial = path.parent / PARTIAL.replace("*", secrets.token_hex(8))
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(not_written(path, error, num_bytes)) from error
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield partial
    finally:
        os.close(lock)
        shutil.rmtree(partial, ignore_errors=True)


def is_folder(path: Path) -> bool:
    """Whether a sharded checkpoint is there, or what is left of one."""
    return path.is_dir() and ((path / MANIFEST).exists() or (path / ".metadata").exists())


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        CheckpointError: If it says nothing, or is of a later version of this package.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint {path} is damaged: its {MANIFEST} cannot be read ({error}); give another one"
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has the format {manifest.get('format')}, where {FORMAT} is read; "
            f"give one of that format, or use the packages that wrote it, {manifest.get('versions', {})}, or later ones"
        )
    return manifest


def damage_of_folder(path: Path, part: tuple[int, int] = (0, 1)) -> str:
    """The reason why the files of a folder are not those that were written, in words; "" if they are.

    Args:
        path: The folder.
        part: Number of a share of the files, and of how many, where several ranks look.
    """
    try:
        files = read_manifest(path)["files"]
    except CheckpointError as error:
        return str(error).partition(" is damaged: ")[2].rpartition("; ")[0] or str(error)
    for name, expected in sorted(files.items())[part[0] :: part[1]]:
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if (size := file.stat().st_size) != expected["bytes"]:
            return f"its file {name} has {size:,} bytes in place of {expected['bytes']:,}"
        if described(file) != expected:
            return f"what {name} holds differs from its checksum"
    return ""


def open_folder(path: Path, load: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """A checkpoint as Lightning knows it, whose tensors are read when they are asked for.

    Args:
        path: A folder.
        load: Reads the file with what is no tensor.

    Raises:
        CheckpointError: If it has no manifest, or that of a later format.
    """
    manifest, folder = read_manifest(path), StoredFolder(path)
    checkpoint = load(path / REST)
    model = checkpoint.pop(MODEL)
    weights: Any = StoredTensors(folder, f"{MODEL}.", aliases=manifest["tied"])
    weights.arrange(model["order"], model["others"])
    if model["metadata"] is not None:
        weights._metadata = model["metadata"]
    checkpoint[MODEL] = weights
    for index, state in enumerate(checkpoint.get(OPTIMIZERS, [])):
        prefix = f"{OPTIMIZERS}.{index}."
        keys = (key.removeprefix(prefix) for key in folder.tensors if key.startswith(prefix))
        numbers = {int(key.partition(".")[0]) for key in keys} | state["state"].keys()
        values, state["state"] = state["state"], {}
        for number in sorted(numbers):
            state["state"][number] = entries = StoredTensors(folder, f"{prefix}{number}.")
            entries.update(values.get(number, {}))
    return checkpoint


def put(partial: Path, path: Path) -> None:
    """Give a folder the name under which it is read. What has that name is there until then, where Linux can do that.

    Args:
        partial: The folder, written.
        path: The name.
    """
    if not path.exists():
        partial.rename(path)
        return
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(partial), os.fsencode(path)
    if exchange is not None and exchange(_AT_CWD, names[0], _AT_CWD, names[1], _EXCHANGE) == 0:
        return  # whoever has made `partial` removes it, and with that what was replaced
    old = partial.with_name(PARTIAL.replace("*", secrets.token_hex(8)))
    path.rename(old)
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True) if old.is_dir() else old.unlink()


def described(file: Path) -> dict[str, Any]:
    """The bytes and the checksum of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
