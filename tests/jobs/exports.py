"""Checkpoints of one process, to be looked into and exported."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import lightning as L
import torch
from torch import Tensor

from lightning_parallel.callbacks import ExponentialMovingAverage
from tests.data import loader
from tests.models.cases import GPT, Case, next_token_loss


class WithHyperParameters(Case):
    """A width that `load_from_checkpoint` needs, and a key of a hook's."""

    def __init__(self, width: int, note: Any = None) -> None:
        super().__init__("adamw")
        self.save_hyperparameters()
        self.model = GPT(width)
        self.loaded: str = ""

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self.model(tokens), tokens)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["of_hook"] = "kept"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["of_hook"]


def trained(module: L.LightningModule, path: Path, **kwargs: Any) -> L.LightningModule:
    """Two steps of `module`, and a checkpoint of them at `path`, with averages."""
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ExponentialMovingAverage(0.5)], **kwargs,
    )  # fmt: skip
    trainer.fit(module, loader(1))
    trainer.save_checkpoint(path)
    return module


class ReadAnew(Mapping[str, Tensor]):
    """A mapping that is no dict and reads a tensor anew each time; how many of its tensors are held at once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._alive: WeakSet[Tensor] = WeakSet()
        self.most_alive = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].clone()
        self._alive.add(tensor)
        self.most_alive = max(self.most_alive, len(self._alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def is_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether names, dtypes and every bit are equal."""
    return set(one) == set(other) and all(_bits(one[name]) == _bits(other[name]) for name in one)


def _bits(tensor: Tensor) -> tuple[Any, ...]:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


def damage(path: Path, folder: Path) -> tuple[Path, Path]:
    """Copies of a checkpoint: one in which a bit of a tensor is another, and one without its end."""
    changed, cut = folder / "changed.ckpt", folder / "cut.ckpt"
    shutil.copy(path, changed)
    content = path.read_bytes()
    at = content.index(b"data/0FB") + 128  # behind the header and the padding of the first tensor's record
    changed.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    cut.write_bytes(content[: len(content) // 2])
    return changed, cut
