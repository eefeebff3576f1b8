"""Lightning's plugin for checkpoints: whole files; and which of them can be read."""

from __future__ import annotations

import inspect
from datetime import datetime
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_parallel.checkpoint.sharded_folder import damage_of_folder, is_folder
from lightning_parallel.checkpoint.whole_file import damage_of, is_zip, read_mapped, write_whole
from lightning_parallel.errors import CheckpointError
from lightning_parallel.ranks.objects import is_shared


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's files; on a local file system one is there whole or not at all, elsewhere Lightning writes it."""

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        local = local_path(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            write_whole(checkpoint, local)

    @override
    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        # Lightning's default is a function that does the same, and that tensors made of others, as in 8 bits, refuse.
        has_option = "weights_only" in inspect.signature(super().load_checkpoint).parameters  # since 2.6
        options = {"weights_only": weights_only} if has_option else {}
        local = local_path(path)
        # Ranks of one machine would each have all of it in memory, though most of them need a part.
        if is_shared() and str(map_location) == "cpu" and local is not None and local.is_file() and is_zip(local):
            return dict(read_mapped(local, **(options or {"weights_only": False})))  # as Lightning does without it
        return super().load_checkpoint(path, map_location=map_location, **options)


def readable(path: Any, damage: str | None = None) -> tuple[Any, str]:
    """The checkpoint to read for `path`, and what is to be said of it, "" if that is `path` and intact.

    In place of a damaged ``last.ckpt``, that is the newest intact checkpoint beside it.

    Args:
        path: As given to the trainer.
        damage: The damage of it, if that is known.

    Raises:
        CheckpointError: If `path` is damaged and has another name, or none beside it is intact.
    """
    local = local_path(path)
    if local is None or not local.exists() or not (damage := _damage(local) if damage is None else damage):
        return path, ""
    words = f"the checkpoint {path} is damaged: {damage}"
    others = [each for each in local.parent.glob("*.ckpt") if each != local and (each.is_file() or is_folder(each))]
    intact = (each for each in sorted(others, key=_written, reverse=True) if not _damage(each))
    before = next(intact, None)
    if before is None:
        raise CheckpointError(f"{words}. None beside it is intact; give another one, or no ckpt_path to begin anew")
    if not local.stem.startswith(ModelCheckpoint.CHECKPOINT_NAME_LAST):
        raise CheckpointError(f"{words}. The newest intact one beside it is {before}: give ckpt_path={before}")
    return before, _INSTEAD.format(words, before, _time(before))


def _damage(path: Path) -> str:
    return damage_of_folder(path) if path.is_dir() else damage_of(path)


_INSTEAD = "{}. Read instead: {}, the newest intact one beside it, of {}"


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _time(path: Path) -> str:
    return datetime.fromtimestamp(_written(path)).astimezone().isoformat(" ", "seconds")


def local_path(path: Any) -> Path | None:
    """The path of a file on this machine; ``None`` for one elsewhere, such as ``s3://bucket/last.ckpt``.

    Args:
        path: As given to the trainer.
    """
    protocols = get_filesystem(path).protocol
    is_local = protocols == "file" or "file" in protocols
    return Path(str(path).rpartition("://")[2]).expanduser().absolute() if is_local else None
