"""The text that every CPython ships, as bytes."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override


class Windows(Dataset[Tensor]):
    """Consecutive windows of a text that do not overlap; a shorter rest at the end is left out.

    Args:
        text: UTF-8.
        context: The length of a window in bytes. An item is int64 of shape (context,), values 0 to 255.
    """

    def __init__(self, text: bytes, context: int) -> None:
        count = len(text) // context
        self.windows = torch.tensor(list(text[: count * context])).view(count, context)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class PythonHelp(LightningDataModule):
    """The texts behind Python's `help()`, about 0.5 MB in all; the last tenth is held out for validation.

    A batch is int64 of shape (batch_size, context), values 0 to 255.

    Args:
        context: The length of a window in bytes.
        batch_size: The number of windows in a batch of one process.
        num_workers: The number of processes that read; 0 reads in the training process, where the text is in memory.
    """

    def __init__(self, context: int = 64, batch_size: int = 8, num_workers: int = 0) -> None:
        super().__init__()
        self.context = context
        self.batch_size = batch_size
        self.num_workers = num_workers

    @override
    def setup(self, stage: str) -> None:
        text = "".join(topics[name] for name in sorted(topics)).encode()
        cut = len(text) * 9 // 10
        self.train, self.val = Windows(text[:cut], self.context), Windows(text[cut:], self.context)

    @override
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(
            self.train, batch_size=self.batch_size, num_workers=self.num_workers, shuffle=True, drop_last=True
        )

    @override
    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.val, batch_size=self.batch_size, num_workers=self.num_workers)
