"""Files of the safetensors format, written tensor by tensor, in shards with an index as Hugging Face names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_parallel.checkpoint.chosen_weights import ChosenWeights
from lightning_parallel.checkpoint.opened import TensorEntry

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = "model-{:05d}-of-{:05d}.safetensors"
_ALIGNMENT = 8
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""dtype -> its name in the format."""


def unwritable_violations(weights: ChosenWeights) -> list[str]:
    """Say what the format has no place for: other dtypes, and what is no tensor."""
    violations = [
        f"{name} has the dtype {entry.dtype}, which safetensors lacks; give --to torch"
        for name, entry in weights.entries.items()
        if entry.dtype not in _NAMES
    ]
    violations += [
        f"{name} is a {type(value).__name__}, and safetensors holds tensors only; give --to torch"
        for name, value in weights.others.items()
    ]
    return violations


def shards_of(weights: ChosenWeights, most_bytes: int) -> list[list[TensorEntry]]:
    """Divide the tensors, each tied one once, in their order; one that is larger than `most_bytes` is alone.

    Args:
        weights: The tensors.
        most_bytes: The most bytes of a file's tensors.
    """
    shards: list[list[TensorEntry]] = [[]]
    num_bytes = 0
    for entry in weights.entries.values():
        if entry.tied_to:
            continue
        if shards[-1] and num_bytes + entry.num_bytes > most_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(entry)
        num_bytes += entry.num_bytes
    return shards


def write_shards(folder: Path, weights: ChosenWeights, shards: Sequence[Sequence[TensorEntry]]) -> None:
    """Write one file, or several and their index.

    Args:
        folder: A folder.
        weights: The tensors.
        shards: Of `shards_of`.
    """
    names = [WHOLE] if len(shards) == 1 else [_SHARD.format(i, len(shards)) for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("xb") as file:
            write_file(file, weights, shard)
    if len(shards) > 1:
        where = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        index = {"metadata": {"total_size": bytes_of(shards)}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def bytes_of(shards: Iterable[Iterable[TensorEntry]]) -> int:
    """Bytes of all tensors of the shards."""
    return sum(entry.num_bytes for shard in shards for entry in shard)


def write_file(file: BufferedWriter, weights: ChosenWeights, shard: Sequence[TensorEntry]) -> None:
    """Write tensors into one file, of which one at a time is in memory.

    Args:
        file: An empty file.
        weights: The tensors.
        shard: Those to write.
    """
    # Wide elements first, as safetensors itself orders them: each tensor is aligned, without gaps between them.
    ordered = sorted(shard, key=lambda entry: -entry.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": _metadata(weights.entries, shard)}
    end = 0
    for entry in ordered:
        offsets = [end, end := end + entry.num_bytes]
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for entry in ordered:
        file.write(_bytes_of(weights[entry.name]))


def _metadata(entries: Mapping[str, TensorEntry], shard: Iterable[TensorEntry]) -> dict[str, str]:
    """The framework, which transformers asks for, and each tied name with the one that is in the file."""
    here = {entry.name for entry in shard}
    tied = {name: entry.tied_to for name, entry in entries.items() if entry.tied_to in here}
    return {"format": "pt", **tied}


def _bytes_of(tensor: Tensor) -> memoryview:
    """The elements of a tensor, without a copy of one that is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type] # an array is a buffer
