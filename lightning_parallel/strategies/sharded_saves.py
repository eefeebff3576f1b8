"""Checkpoints of which each rank writes its own part: who writes what, and what all ranks hear of it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_parallel.checkpoint.folder_writer import Contents, FolderWriter, Staging, bytes_of_plan, contents_of
from lightning_parallel.checkpoint.full_state import first_names
from lightning_parallel.checkpoint.places import check_place
from lightning_parallel.checkpoint.sharded_folder import is_folder
from lightning_parallel.checkpoint.whole_file import not_written
from lightning_parallel.checkpoint.whole_folder import partial_folder
from lightning_parallel.errors import CheckpointError
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.mesh import build_host_group
from lightning_parallel.ranks.objects import at_first_rank, from_first_rank
from lightning_parallel.ranks.stage_owners import all_stage_owners
from lightning_parallel.strategies.background_saves import Exchange, Job, Outcome

if TYPE_CHECKING:
    import torch

_PACKAGES = ("lightning_parallel", "torch", "lightning")


class SavingRanks(Protocol):
    """A strategy, as far as writing in parts reads it."""

    @property
    def global_rank(self) -> int:
        """This rank."""

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""


def parts_job(
    ranks: SavingRanks,
    module: nn.Module,
    checkpoint: Mapping[str, Any],
    path: Path,
    manifest: Mapping[str, Any],
    staging: Staging | None,
) -> Job:
    """Plan a checkpoint in a folder, of which each rank writes what it holds. A collective.

    Args:
        ranks: The strategy.
        module: The module.
        checkpoint: As Lightning makes it, with a rank's own tensors.
        path: The folder.
        manifest: What to say of the checkpoint.
        staging: Where this rank's tensors are copied, if training goes on while they are written.

    Returns:
        The rest: it writes the folder.
    """
    saving = _Saving(ranks, path)
    with saving.noting():
        saving.plan(contents_of(checkpoint, _tied(module), _writes(module, checkpoint, ranks.global_rank)))
    saving.arrange()
    if staging is not None:
        with saving.noting():
            saving.stage(staging)
    described = {**manifest, "versions": {name: metadata.version(name) for name in _PACKAGES}}

    def job(exchange: Exchange) -> Outcome:
        with saving.open_folder:
            saving.write(exchange)
            saving.finish(described)
        return exchange.said_by_first(saving.problem), saving.cause  # when nothing half written is left

    return job


class _Saving:
    """One save on one rank. Each step runs on all ranks, and does nothing but exchange once one of them has failed."""

    def __init__(self, ranks: SavingRanks, path: Path) -> None:
        self._path, self.open_folder = path, contextlib.ExitStack()
        self._group = build_host_group(ranks.root_device.type) if dist.is_initialized() else None
        self._rank = ranks.global_rank
        self._writer: FolderWriter | None = None
        self._values: dict[tuple[int, int, str], Any] = {}
        self._num_bytes = 0
        self.problem = ""
        self.cause: Exception | None = None

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Inside this context, an error is noted as the reason why this rank cannot go on."""
        try:
            yield
        except Exception as error:
            self.cause, self.problem = error, _words(error, self._path, self._rank, self._num_bytes)

    def plan(self, contents: Contents) -> None:
        """Find out what this rank has."""
        self._values, self._num_bytes = contents.values, contents.num_bytes  # at most: others may have the same
        self._writer = FolderWriter(contents, self._rank)

    def arrange(self) -> None:
        """Tell rank 0, and hear what to write where."""
        plan = None if self._writer is None else self._writer.plan
        gathered = at_first_rank((plan, self._values, self.problem), self._group)
        answers: list[Any] = [(None, None, self.problem)] * len(gathered)
        if gathered:
            self.problem = next((problem for *_, problem in gathered if problem), "")
            with self.noting():
                if not self.problem:
                    assert self._writer is not None
                    plans, values, _ = zip(*gathered, strict=True)
                    for each in values:
                        self._writer.add_values(each)
                    arranged = self._writer.arrange(plans)
                    self._num_bytes = sum(map(bytes_of_plan, arranged))
                    check_place(self._path, is_folder(self._path))
                    partial = self.open_folder.enter_context(partial_folder(self._path, self._num_bytes))
                    answers = [(str(partial), each, "") for each in arranged]
            if self.problem:
                answers = [(None, None, self.problem)] * len(gathered)
        self._folder, self._plan, self.problem = from_first_rank(answers, self._group)

    def stage(self, staging: Staging) -> None:
        """Copy what this rank is going to write."""
        if not self.problem:
            assert self._writer is not None
            self._writer.stage(self._plan, staging)

    def write(self, exchange: Exchange) -> None:
        """Write this rank's part."""
        written = None
        if not self.problem:
            assert self._writer is not None
            with self.noting():
                written = self._writer.write(Path(self._folder), self._plan)
        self._written = [pickle.loads(each) for each in exchange.hear_all(pickle.dumps((written, self.problem)))]

    def finish(self, manifest: Mapping[str, Any]) -> None:
        """Complete the folder, on rank 0."""
        if self._rank != 0:
            return
        self.problem = next((problem for _, problem in self._written if problem), "")
        if not self.problem:
            assert self._writer is not None
            with self.noting():
                written = [each for each, _ in self._written]
                self._writer.finish(self._path, Path(self._folder), written, manifest)


def _words(error: Exception, path: Path, rank: int, num_bytes: int) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return not_written(path, error, num_bytes)
    return (
        f"the checkpoint {path} could not be written: rank {rank} raised {type(error).__name__}: {error}. Write to "
        "another folder (ModelCheckpoint(dirpath=...)), which all ranks must see, give checkpoint='whole', with which "
        "rank 0 alone writes, or let training go on without it: on_save_error='warn'"
    )


def _tied(module: nn.Module) -> dict[str, str]:
    return {name: first for name, first in first_names(module).items() if name != first}


def _writes(module: nn.Module, checkpoint: Mapping[str, Any], rank: int) -> Callable[[str], bool]:
    """Tells which tensors of the model this rank writes, for it has them and others may not have equal ones."""
    owners_by_name = all_stage_owners(module)
    buffers = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    state_dict = checkpoint.get("state_dict", {})

    def writes(name: str) -> bool:
        value, owners = state_dict[name], owners_by_name.get(name)
        # A placeholder under any name: a hook may have given tensors other ones.
        if is_placeholder(value) or (owners is not None and not owners.counts_here):
            return False
        # Running averages may differ between ranks that read different samples; those of the first are saved.
        is_own = name in buffers and isinstance(value, Tensor) and not isinstance(value, DTensor)
        return not is_own or (rank == 0 if owners is None else owners.reaches_first_rank)

    return writes
