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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from lightning_parallel.checkpoint.stored_tensors import StoredFolder, StoredTensors
from lightning_parallel.checkpoint.whole_file import PARTIAL, not_written, remove_partial, sync_folder, write_whole
from lightning_parallel.errors import CheckpointError
from lightning_parallel.ranks.dtensors import local_of

FORMAT = 1
"""Version of the format of folders."""
MANIFEST, REST = "manifest.json", "rest.pt"
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
_BLOCK = 1 << 22
_AT_CWD, _EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: paths from the working directory, and that the two change places."""


@dataclass(frozen=True)
class Contents:
    """A checkpoint as this rank has it, to be written to a folder.

    Args:
        tensors: Key -> tensor or this rank's shard of it; equal ones of several ranks are written once.
        values: Number of an optimizer, number of a parameter, name -> what is no tensor in its state.
        rest: All else; that of rank 0 is written.
        tied: Name of a tensor of the model -> the name under which the same tensor is there, too.
    """

    tensors: dict[str, Tensor]
    values: dict[tuple[int, int, str], Any]
    rest: dict[str, Any]
    tied: dict[str, str] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's tensors."""
        return sum(local_of(tensor).nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Written:
    """The files that one rank has written.

    Args:
        results: As torch's planner wants to know it.
        files: Name of a file -> its bytes and checksum.
    """

    results: list[WriteResult]
    files: dict[str, dict[str, Any]]


def contents_of(checkpoint: Mapping[str, Any], tied: Mapping[str, str], is_written: Callable[[str], bool]) -> Contents:
    """Take a checkpoint apart.

    Args:
        checkpoint: As Lightning makes it, with a rank's own tensors.
        tied: Name of a tensor of the model -> another name of the same.
        is_written: Whether this rank writes a tensor of the model; at least one has to.
    """
    rest = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
    state_dict = checkpoint.get(MODEL, {})
    aliases = {alias: name for alias, name in tied.items() if alias in state_dict and name in state_dict}
    others = {name: value for name, value in state_dict.items() if not isinstance(value, Tensor)}
    tensors = {
        f"{MODEL}.{name}": value
        for name, value in state_dict.items()
        if name not in others and name not in aliases and is_written(name)
    }
    metadata = getattr(state_dict, "_metadata", None)
    rest[MODEL] = {"metadata": metadata, "others": others, "order": list(state_dict)}
    values: dict[tuple[int, int, str], Any] = {}
    if OPTIMIZERS in checkpoint:
        rest[OPTIMIZERS] = [{**state, "state": {}} for state in checkpoint[OPTIMIZERS]]
    for index, state in enumerate(checkpoint.get(OPTIMIZERS, ())):
        for number, entries in state["state"].items():
            for name, value in entries.items():
                if isinstance(value, Tensor):
                    tensors[f"{OPTIMIZERS}.{index}.{number}.{name}"] = value
                else:
                    values[index, number, name] = value
    return Contents(tensors, values, rest, aliases)


class FolderWriter:
    """One rank's part in writing a folder; the caller carries plans and results between the ranks.

    Args:
        contents: The checkpoint.
        rank: This rank.

    Example:
        >>> writer = FolderWriter(contents, rank)
        >>> plans = gathered(writer.plan)  # on rank 0
        >>> own = scattered(writer.arrange(plans))
        >>> written = writer.write(partial, own)
        >>> writer.finish(path, partial, gathered(written), manifest)  # on rank 0
    """

    def __init__(self, contents: Contents, rank: int) -> None:
        self._contents, self._rank = contents, rank
        self._planner = DefaultSavePlanner()
        self._planner.set_up_planner(contents.tensors, is_coordinator=rank == 0)
        self.plan = self._planner.create_local_plan()
        """The tensors of this rank."""

    def arrange(self, plans: Sequence[SavePlan]) -> list[SavePlan]:
        """The share of each rank, so that nothing is written twice. On rank 0 alone.

        Args:
            plans: Those of all ranks.
        """
        arranged, self._metadata = self._planner.create_global_plan(list(plans))
        return FileSystemWriter(".").prepare_global_plan(arranged)

    def write(self, partial: Path, plan: SavePlan) -> Written:
        """Write this rank's tensors, and bring them to the disk.

        Args:
            partial: The folder, which is there.
            plan: As rank 0 has arranged it.

        Raises:
            OSError: If it cannot be written.
        """
        writer = self._writer(partial)
        prefix = plan.storage_data.prefix
        with _errors_of_the_disk():
            results = writer.write_data(self._planner.finish_plan(plan), self._planner).wait()
        return Written(list(results), {file.name: _described(file) for file in sorted(partial.glob(f"{prefix}*"))})

    def finish(self, path: Path, partial: Path, written: Sequence[Written], manifest: Mapping[str, Any]) -> None:
        """Complete the folder, and give it its name. On rank 0 alone.

        Args:
            path: That name; what was there is replaced at once.
            partial: The folder, to which all ranks have written.
            written: What they have.
            manifest: What to say of the checkpoint.
        """
        self._writer(partial).finish(self._metadata, [each.results for each in written])
        try:
            write_whole(self._contents.rest, partial / REST)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(partial / REST), str(path))) from error
        files = {name: described for each in written for name, described in each.files.items()}
        files |= {name: _described(partial / name) for name in (".metadata", REST)}
        own = {"format": FORMAT, "form": "sharded", **manifest, "tied": self._contents.tied, "files": files}
        with (partial / MANIFEST).open("w") as file:
            json.dump(own, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        _put(partial, path)
        sync_folder(path.parent)

    def add_values(self, values: Mapping[tuple[int, int, str], Any]) -> None:
        """Add to the rest of the checkpoint what other ranks have that is no tensor. On rank 0 alone."""
        for (index, number, name), value in values.items():
            self._contents.rest[OPTIMIZERS][index]["state"].setdefault(number, {})[name] = value

    def _writer(self, partial: Path) -> FileSystemWriter:
        writer = FileSystemWriter(partial, thread_count=1)
        writer.set_up_storage_writer(self._rank == 0, rank=self._rank, use_collectives=True)
        return writer


@contextlib.contextmanager
def _errors_of_the_disk() -> Iterator[None]:
    """Inside this context, an error of the disk is raised as such: torch raises another one while it closes files."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from None


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
    for name, described in sorted(files.items())[part[0] :: part[1]]:
        file = path / name
        if not file.is_file():
            return f"its file {name} is missing"
        if (size := file.stat().st_size) != described["bytes"]:
            return f"its file {name} has {size:,} bytes in place of {described['bytes']:,}"
        if _described(file) != described:
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
    described = checkpoint.pop(MODEL)
    weights: Any = StoredTensors(folder, f"{MODEL}.", aliases=manifest["tied"])
    weights.arrange(described["order"], described["others"])
    if described["metadata"] is not None:
        weights._metadata = described["metadata"]
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


def _put(partial: Path, path: Path) -> None:
    """Give `partial` the name `path`. What has that name is there until then: the two change places where Linux can."""
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


def _described(file: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK):
            digest.update(block)
    return {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
