"""A checkpoint in a folder, to which each rank writes what it holds; it is there whole or not at all.

Tensors are in the files of torch.distributed.checkpoint, all else in `rest.pt`, and a manifest says what there is.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_parallel.checkpoint.callback_tensors import CALLBACKS, TAKEN, put_back
from lightning_parallel.checkpoint.stored_tensors import StoredFolder, StoredTensors
from lightning_parallel.errors import CheckpointError

FORMAT = 2
"""Version of the format of folders; since 2, tensors of callbacks may be among those of each rank."""
_READ = (1, FORMAT)
MANIFEST, REST = "manifest.json", "rest.pt"
MODEL, OPTIMIZERS = "state_dict", "optimizer_states"
_BLOCK = 1 << 20
"""Bytes that are read at a time: the processor's cache has them when their checksum is computed."""
_CHECKSUM = "sha256"


def is_folder(path: Path) -> bool:
    """Whether a sharded checkpoint is there, or what is left of one."""
    return path.is_dir() and ((path / MANIFEST).exists() or (path / ".metadata").exists())


def manifest_text(manifest: Mapping[str, Any]) -> str:
    """The contents of the file of a manifest, with a checksum of them.

    Args:
        manifest: What JSON can hold.
    """
    own = json.loads(json.dumps(manifest))
    return json.dumps({**own, _CHECKSUM: _checksum(own)}, indent=1)


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        CheckpointError: If it says nothing, or is of a later version of this package.
    """
    manifest: Any = None
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        problem = _problem_of(manifest)
    except (OSError, ValueError) as error:
        problem = f"cannot be read ({error})"
    if problem:
        raise CheckpointError(f"the checkpoint {path} is damaged: its {MANIFEST} {problem}; give another one")
    if manifest.get("format") not in _READ:
        raise CheckpointError(
            f"the checkpoint {path} has the format {manifest.get('format')}, where 1 and 2 are read; "
            "give one of those formats, or use the packages that wrote it, "
            f"{manifest.get('versions', {})}, or later ones"
        )
    return dict(manifest)


def _problem_of(manifest: Any) -> str:
    """The reason why it is none that was written, in words; "" if it is, or of another format."""
    if not isinstance(manifest, dict):
        return "is none of a checkpoint"
    if manifest.get("format") not in _READ:
        return ""
    own = dict(manifest)
    checksum = own.pop(_CHECKSUM, None)  # folders of earlier versions have none
    if checksum is not None and checksum != _checksum(own):
        return "differs from its checksum"
    return next((f"lacks {key}" for key in ("files", "tied") if not isinstance(own.get(key), dict)), "")


def _checksum(own: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


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
        try:
            damage = _damage_of_file(path / name, expected)
        except OSError as error:
            damage = f"its file {name} cannot be read ({error})"
        if damage:
            return damage
    return ""


def _damage_of_file(file: Path, expected: Mapping[str, Any]) -> str:
    if not file.is_file():
        return f"its file {file.name} is missing"
    if (size := file.stat().st_size) != expected["bytes"]:
        return f"its file {file.name} has {size:,} bytes in place of {expected['bytes']:,}"
    kind = "sha256" if "sha256" in expected else "crc32"
    return "" if described(file, kind) == expected else f"what {file.name} holds differs from its checksum"


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
    put_back(checkpoint.get(CALLBACKS, {}), checkpoint.pop(TAKEN, []), folder)
    return checkpoint


def described(file: Path, kind: str = "crc32") -> dict[str, Any]:
    """The bytes and the checksum of a file.

    Args:
        file: The file.
        kind: That of the checksum, ``"sha256"`` in folders of earlier versions.
    """
    digest, checksum = hashlib.sha256(), 0
    buffer = memoryview(bytearray(_BLOCK))
    with file.open("rb", buffering=0) as opened:
        while count := opened.readinto(buffer):
            if kind == "sha256":
                digest.update(buffer[:count])
            else:
                checksum = zlib.crc32(buffer[:count], checksum)
    return {"bytes": file.stat().st_size, kind: digest.hexdigest() if kind == "sha256" else f"{checksum:08x}"}
