"""Writing a checkpoint to a folder, each rank its part, by torch.distributed.checkpoint."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_parallel.checkpoint.callback_tensors import CALLBACKS, TAKEN, take_apart
from lightning_parallel.checkpoint.copies import unshared
from lightning_parallel.checkpoint.places import put, sync_folder
from lightning_parallel.checkpoint.sharded_folder import (
    FORMAT,
    MANIFEST,
    MODEL,
    OPTIMIZERS,
    REST,
    described,
    manifest_text,
)
from lightning_parallel.checkpoint.whole_file import write_whole
from lightning_parallel.checkpoint.whole_folder import sync_file
from lightning_parallel.errors import CheckpointError
from lightning_parallel.ranks.dtensors import local_of


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
    if CALLBACKS in checkpoint:
        of_callbacks, rest[CALLBACKS], taken = take_apart(checkpoint[CALLBACKS])
        tensors |= of_callbacks
        rest |= {TAKEN: taken} if taken else {}
    return Contents(tensors, values, rest, aliases)


def bytes_of_plan(plan: SavePlan) -> int:
    """Bytes of the tensors that a rank shall write."""
    tensors = [item.tensor_data for item in plan.items if item.tensor_data is not None]
    return sum(each.chunk.sizes.numel() * each.properties.dtype.itemsize for each in tensors)


class Staging:
    """Copies of tensors in host memory, from which they are written while training changes them; used again each time.

    Memory is pinned where tensors come from an accelerator, which copies to it while the host goes on.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, Tensor] = {}

    def copies(self, tensors: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """A copy of each of `tensors`, all of them complete."""
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}
        self._buffers = {key: self._buffers[key] for key in tensors if key in self._buffers}  # none for what is gone
        for key, tensor in tensors.items():
            buffer = self._buffers.get(key)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                pins = tensor.device.type != "cpu"
                self._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pins)
            self._buffers[key].copy_(tensor.detach(), non_blocking=True)
        for device in devices:
            torch.accelerator.synchronize(device)
        return dict(self._buffers)


class _Planner(DefaultSavePlanner):
    """Torch's planner, which gives copies to the writer once there are any."""

    staged: Mapping[Any, Tensor] | None = None

    @override
    def resolve_data(self, write_item: WriteItem) -> Any:
        return super().resolve_data(write_item) if self.staged is None else self.staged[write_item.index]


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
        self._planner = _Planner()
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

    def stage(self, plan: SavePlan, staging: Staging) -> None:
        """Copy what is going to be written, so that it may change afterwards.

        Args:
            plan: As rank 0 has arranged it.
            staging: Where to.
        """
        staged = {item.index: self._planner.resolve_data(item) for item in plan.items}
        self._planner.staged = staging.copies(staged)
        self._contents = replace(self._contents, rest=unshared(self._contents.rest))

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
        files = sorted(partial.glob(f"{prefix}*"))
        with ThreadPoolExecutor(1) as disk:  # which brings files to the disk while their checksums are computed
            synced = [disk.submit(sync_file, file) for file in files]
            found = {file.name: described(file) for file in files}
            for each in synced:
                each.result()
        return Written(list(results), found)

    def finish(self, path: Path, partial: Path, written: Sequence[Written], manifest: Mapping[str, Any]) -> None:
        """Complete the folder, and give it its name. On rank 0 alone.

        Args:
            path: That name; what was there is replaced at once.
            partial: The folder, to which all ranks have written.
            written: What they have.
            manifest: What to say of the checkpoint.
        """
        self._writer(partial).finish(self._metadata, [each.results for each in written])
        sync_file(partial / ".metadata")
        try:
            write_whole(self._contents.rest, partial / REST)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(str(partial / REST), str(path))) from error
        files = {name: each_file for each in written for name, each_file in each.files.items()}
        files |= {name: described(partial / name) for name in (".metadata", REST)}
        own = {"format": FORMAT, "form": "sharded", **manifest, "tied": self._contents.tied, "files": files}
        with (partial / MANIFEST).open("w") as file:
            file.write(manifest_text(own))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(partial)
        put(partial, path)

    def add_values(self, values: Mapping[tuple[int, int, str], Any]) -> None:
        """Add to the rest of the checkpoint what other ranks have that is no tensor. On rank 0 alone."""
        for (index, number, name), value in values.items():
            self._contents.rest[OPTIMIZERS][index]["state"].setdefault(number, {})[name] = value

    def _writer(self, partial: Path) -> FileSystemWriter:
        writer = FileSystemWriter(partial, thread_count=1, sync_files=False)
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
