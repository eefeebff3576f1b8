"""Weights of a model that was trained before, in files that each rank reads its own parts of."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_parallel.checkpoint.full_state import first_names
from lightning_parallel.checkpoint.opened import entries_of, open_checkpoint
from lightning_parallel.checkpoint.safetensors_files import INDEX, WHOLE
from lightning_parallel.checkpoint.sharded_folder import is_folder
from lightning_parallel.checkpoint.stored_tensors import StoredTensors, read_alone
from lightning_parallel.module.differences import first_of
from lightning_parallel.module.placeholders import is_placeholder
from lightning_parallel.ranks.dtensors import sharded_like

_SUFFIX = ".safetensors"


class Weights(Protocol):
    """Tensors in files."""

    @property
    def described(self) -> Mapping[str, Tensor]:
        """Name -> a tensor of the same shape and dtype, on the meta device."""

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors into others of their shapes, which may be sharded: this rank's parts then. No collective."""


class SafetensorsWeights(dcp.HuggingFaceStorageReader):
    """Files of the safetensors format, of which a rank reads the slices that it has.

    Args:
        path: A file, or a folder as Hugging Face's, in which the index names the files if there is one.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path.parent if path.is_file() else path))
        self._files = {each.name for each in _files_of(path)}
        self.described = {
            name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
            for name, each in self.read_metadata().state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = super().read_metadata(*args, **kwargs)
        files = {index: Path(each.relative_path).name for index, each in (metadata.storage_data or {}).items()}
        for index in [index for index, name in files.items() if name not in self._files]:
            del metadata.storage_data[index]
            metadata.state_dict_metadata.pop(index.fqn, None)
        return metadata

    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors into others, as `Weights.read` says."""
        read_alone(targets, self)


class CheckpointWeights:
    """The tensors of a checkpoint of Lightning, of this package, or of `torch.save`.

    Args:
        path: A file, or the folder of a sharded checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._weights = open_checkpoint(path)["state_dict"]
        self.described = {
            each.name: torch.empty(each.shape, dtype=each.dtype, device="meta") for each in entries_of(self._weights)
        }

    @torch.no_grad()
    def read(self, targets: Mapping[str, Tensor]) -> None:
        """Read tensors into others, as `Weights.read` says."""
        if isinstance(self._weights, StoredTensors):
            self._weights.read_into(targets)
            return
        for name, target in targets.items():
            value = self._weights[name]  # of a mapped file: what is not copied here is not read
            target.copy_(sharded_like(value, target) if isinstance(target, DTensor) else value)


def open_weights(path: Path) -> Weights:
    """Open files of weights, without reading these.

    Args:
        path: A safetensors file; a folder of these, as ``save_pretrained`` of Hugging Face writes it; or a checkpoint.

    Raises:
        CheckpointError: If there is no such file, or if it holds anything else.
    """
    if path.suffix == _SUFFIX and path.is_file():
        return SafetensorsWeights(path)
    if path.is_dir() and not is_folder(path) and _files_of(path):
        return SafetensorsWeights(path)
    return CheckpointWeights(path)


def _files_of(path: Path) -> list[Path]:
    """The files of weights, without others beside them, such as those in another layout of names."""
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        return sorted({path / name for name in json.loads((path / INDEX).read_text())["weight_map"].values()})
    return [path / WHOLE] if (path / WHOLE).is_file() else sorted(path.glob(f"*{_SUFFIX}"))


@dataclass(frozen=True)
class WeightsOfModule:
    """Names of a module's tensors, and of those in files that are read into them.

    Args:
        prefix: What the module has in front of the names in the files.
        names: Name in the files -> name in the module.
        missing: Names of the module, below the prefix, that the files do not have.
        unexpected: Names in the files that the module does not have.
        violations: Reasons why they cannot be read; empty if they can.
    """

    prefix: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    violations: tuple[str, ...] = ()


def matched(module: nn.Module, described: Mapping[str, Tensor], prefix: str | None, *, strict: bool) -> WeightsOfModule:
    """Match the tensors in files with those of a module, sharded or not.

    Args:
        module: The module.
        described: Those in the files.
        prefix: What the module has in front of the names in the files; ``None`` to look for it.
        strict: Whether each must have its counterpart.
    """
    targets = {name: each for name, each in module.state_dict().items() if isinstance(each, Tensor)}
    if prefix is None:
        found = _prefixes(targets, described)
        if len(found) != 1:
            return WeightsOfModule(
                violations=(_AMBIGUOUS.format(_shown(found)) if found else _strange(targets, described),)
            )
        prefix = found[0]
    names = {name: prefix + name for name in described if prefix + name in targets}
    if not names:
        return WeightsOfModule(prefix, violations=(_strange(targets, described, prefix),))
    firsts = first_names(module)
    read = {firsts.get(name, name) for name in names.values()}
    missing = tuple(n for n in targets if n.startswith(prefix) and firsts.get(n, n) not in read and n not in read)
    unexpected = tuple(name for name in described if name not in names)
    violations = [
        f"{name} has the shape {list(described[key].shape)} in the files, and {list(targets[name].shape)} in the "
        "module; build it in that size, or give files without it and strict=False"
        for key, name in names.items()
        if described[key].shape != targets[name].shape
    ]
    violations += [
        f"{name} is of {described[key].dtype} in the files, and of {targets[name].dtype} in the module; give "
        "files that are not quantized"
        for key, name in names.items()
        if targets[name].is_floating_point() and not described[key].dtype.is_floating_point
    ]
    if strict and missing:
        violations.append(f"the files lack {first_of(missing)}; give strict=False to leave them as they are")
    if strict and unexpected:
        violations.append(f"the module has no {first_of(unexpected)}; give strict=False to leave them out")
    return WeightsOfModule(prefix, names, missing, unexpected, tuple(violations))


def read_weights(module: nn.Module, weights: Weights, names: Mapping[str, str]) -> None:
    """Read tensors into a module, sharded or not: this rank's parts, one tensor at a time. No collective.

    Args:
        module: The module, changed in place.
        weights: Those in the files.
        names: Name in the files -> name in the module.
    """
    targets = module.state_dict()
    own = {key: targets[name] for key, name in names.items() if not is_placeholder(targets[name])}
    if own:
        weights.read(own)


def _prefixes(targets: Iterable[str], described: Iterable[str]) -> list[str]:
    """The prefixes with which most names in the files are names of the module: one, unless it has such parts twice."""
    names, counts = set(described), Counter[str]()
    for name in targets:
        ends = [0, *(end + 1 for end, letter in enumerate(name) if letter == ".")]
        counts.update(name[:end] for end in ends if name[end:] in names)
    most = max(counts.values(), default=0)
    return sorted(each for each, count in counts.items() if count == most)


def _shown(prefixes: Iterable[str]) -> str:
    return " or ".join(f"prefix={each!r}" for each in prefixes)


def _strange(targets: Iterable[str], described: Iterable[str], prefix: str = "") -> str:
    with_prefix = f" with {prefix!r} in front" if prefix else ""
    return (
        f"no name in the files{with_prefix} is one of the module: the files have {first_of(list(described))}, and the "
        f"module has {first_of(list(targets))}; give prefix=, or files of this model"
    )


_AMBIGUOUS = "the module has several parts with the names in the files; give {}"
